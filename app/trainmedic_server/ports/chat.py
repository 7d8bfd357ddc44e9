"""Chat messages that show a run's question. Their records are deleted with the run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from trainmedic_server.domain.shown_question import ShownQuestion


class ShownQuestions(Protocol):
    def of_runs(self, run_ids: Collection[str]) -> list[ShownQuestion]: ...
    def save(self, shown: ShownQuestion) -> None: ...
