"""Chat messages that show a run's question. Their records are deleted with the run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from msgspec import Struct


class ShownQuestion(Struct, frozen=True):
    run_id: str
    step: str
    channel: str
    message: str  # The chat's ID of the message
    shown: str  # Hash of the shown content


class ShownQuestions(Protocol):
    def of_runs(self, run_ids: Collection[str]) -> list[ShownQuestion]: ...
    def save(self, shown: ShownQuestion) -> None: ...
