"""Stored effects, and positions of event listeners."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Protocol

from trainmedic_server.domain.effect import Effect


class EffectRecords(Protocol):
    def of_runs(self, run_ids: Collection[str]) -> dict[str, Effect]: ...

    def due(self, moment: datetime, limit: int) -> list[Effect]:
        """Return effects to be measured by `moment`, earliest first."""
        ...

    def save(self, effects: Sequence[Effect]) -> None: ...


class EventPositions(Protocol):
    def position(self, listener: str) -> int | None:
        """Return the ``seq`` of the last event taken; None for a new listener."""
        ...

    def save_position(self, listener: str, seq: int) -> None: ...
