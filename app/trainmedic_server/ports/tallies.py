"""What the runs of each playbook came to, counted by the run store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import Protocol

from msgspec import Struct, field

from trainmedic_server.domain.effect import EffectVerdict
from trainmedic_server.domain.run import Status


class PlaybookTally(Struct):
    """The runs of one playbook that were created in a time, and the decisions not to start one."""

    statuses: Counter[Status] = field(default_factory=Counter)
    effects: Counter[EffectVerdict] = field(default_factory=Counter)
    timed_out: int = 0
    """Started runs in which an attempt, a wait or a question timed out."""
    undone_by_hand: int = 0
    """Started runs that a person has ordered to be taken back."""
    repeated: int = 0
    """Runs that were started within an hour after one of the same playbook on the same target had ended."""
    repair_seconds: Counter[float] = field(default_factory=Counter)
    """From the admission to the end of each that succeeded, to two digits: how many there are of each length."""
    person_seconds: Counter[float] = field(default_factory=Counter)
    """From the question to a person's answer, of each question that a person has answered, likewise."""

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
    """Counts runs, and never waits for a writer."""

    async def tally(self, since: datetime, until: datetime) -> Mapping[str, PlaybookTally]:
        """Return what the runs created from `since` to before `until` came to, by playbook. Raises
        StoreUnavailable."""
        ...

    async def effects_between(self, since: datetime, until: datetime, limit: int) -> Mapping[str, EffectVerdict]:
        """Return the verdicts on the runs that acted from `since` to before `until`, by run; the newest of more than
        `limit`. Raises StoreUnavailable."""
        ...
