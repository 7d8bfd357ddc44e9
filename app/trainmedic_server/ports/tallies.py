"""Counts of runs for reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import Protocol

from msgspec import Struct, field

from trainmedic_server.domain.effect import EffectVerdict
from trainmedic_server.domain.run import Status


class PlaybookTally(Struct):
    """Terms: ``docs/reference/reports.md``."""

    statuses: Counter[Status] = field(default_factory=Counter)
    effects: Counter[EffectVerdict] = field(default_factory=Counter)
    timed_out: int = 0
    undone_by_hand: int = 0
    repeated: int = 0
    repair_seconds: Counter[float] = field(default_factory=Counter)
    """Successful runs by duration from admission: seconds, rounded to two significant digits."""
    person_seconds: Counter[float] = field(default_factory=Counter)
    """Answered questions by seconds until the answer, rounded likewise."""

    def add(self, other: PlaybookTally) -> None:
        self.statuses += other.statuses
        self.effects += other.effects
        self.timed_out += other.timed_out
        self.undone_by_hand += other.undone_by_hand
        self.repeated += other.repeated
        self.repair_seconds += other.repair_seconds
        self.person_seconds += other.person_seconds

    @property
    def started(self) -> int:
        return self.statuses.total() - self.statuses[Status.NOT_STARTED] - self.statuses[Status.OBSERVED]


class TallySource(Protocol):
    async def tally(self, since: datetime, until: datetime) -> Mapping[str, PlaybookTally]:
        """Count the runs created from `since` to before `until`, by playbook; effects by the time of the act. Raises
        StoreUnavailable.
        """
        ...

    async def effects_between(self, since: datetime, until: datetime, limit: int) -> Mapping[str, EffectVerdict]:
        """Return effect verdicts by run, for the newest `limit` runs that acted from `since` to before `until`.

        Raises StoreUnavailable.
        """
        ...
