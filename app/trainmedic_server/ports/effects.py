"""The measured effects of runs, and how far each listener to the events has come, as the run store keeps them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Protocol

from trainmedic_server.domain.effect import Effect


class EffectRecords(Protocol):
    """The effects, within one transaction of the run store."""

    def of_runs(self, run_ids: Collection[str]) -> dict[str, Effect]:
        """Return the effects of those of these runs that have one."""
        ...

    def due(self, moment: datetime, limit: int) -> list[Effect]:
        """Return those that are to be measured by `moment`, in the order in which that became due."""
        ...

    def save(self, effects: Sequence[Effect]) -> None:
        """Insert or replace, by the run."""
        ...


class EventPositions(Protocol):
    """Up to which event each listener has taken them, within one transaction of the run store."""

    def position(self, listener: str) -> int | None:
        """Return the ``seq`` of the last event that it has taken; None for one that has never listened."""
        ...

    def save_position(self, listener: str, seq: int) -> None: ...
