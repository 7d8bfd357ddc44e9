"""The messages of a chat that show questions, as a unit of work sees them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from trainmedic_server.domain.shown_question import ShownQuestion


class ShownQuestions(Protocol):
    """Which message shows which question; gone with the run."""

    def of_runs(self, run_ids: Collection[str]) -> list[ShownQuestion]: ...
    def save(self, shown: ShownQuestion) -> None:
        """Keep it, in place of what was kept of this question."""
        ...
