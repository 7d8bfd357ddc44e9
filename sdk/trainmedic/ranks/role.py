"""What rank 0 and the other ranks do differently, as the synchronizer asks for it.

``coordinator`` is the role of rank 0, ``participant`` that of every other rank. All methods are called in the
synchronizer's thread, those after `join` only once it has returned a store.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Mapping, Protocol

from trainmedic.ranks.decisions import AgreedOutcome, SyncDecision
from trainmedic.ranks.shared_store import SharedStore

HEARTBEAT_EVERY = 2.0
"""Seconds between two heartbeats of a rank."""
HEARTBEAT_OF_MANY = 5.0
"""The same in a job of more ranks than `MANY_RANKS`, so that the store has time for them."""
MANY_RANKS = 64


class RankLost(Exception):
    """This rank cannot take part any more; the text says why."""


@dataclass(frozen=True)
class TrainingPosition:
    """Where the training thread is. Made anew at each sync point."""

    number: int = -1
    """The sync point that it has passed last."""
    calls: int = 0
    """How many calls of `Medic.commands` it had made by then."""
    span: int = 1
    """How many calls after that one the next sync point is."""
    at: float = field(default_factory=time.monotonic)
    """When that was, by the monotonic clock."""


@dataclass(frozen=True)
class RankStatus:
    """What a rank shows the others with each heartbeat."""

    heartbeat: int
    """Counts the heartbeats of its process."""
    position: TrainingPosition
    about: Mapping[str, Any]
    """Where the rank runs: its node, host and GPU."""
    stats: Mapping[str, Any]
    """Its figures, see `trainmedic.Medic.stats`."""

    def fields(self) -> dict[str, Any]:
        position = {"passed": self.position.number, "calls": self.position.calls}
        return {"heartbeat": self.heartbeat, **position, "about": dict(self.about), "stats": dict(self.stats)}


class RankRole(Protocol):
    """The part of one rank."""

    lead: float
    """How many seconds before the training thread is expected at a sync point its decision is made or read."""

    def join(self) -> SharedStore | None:
        """Find the keys of this very start of the job; None while they are not found."""
        ...

    def has_to_rejoin(self, position: TrainingPosition) -> bool:
        """Whether a later start of the job has taken over before this rank's first sync point. Raises RankLost where
        it came after."""
        ...

    def decide(self, position: TrainingPosition, waited: float | None) -> SyncDecision | None:
        """The decision of the next sync point; None while there is none. `waited` is for how many seconds the
        training thread has waited for it, None where it does not wait yet. Raises RankLost."""
        ...

    def agree(self, decision: SyncDecision, statements: dict[int, Any], missing: list[int]) -> Any:
        """The agreed outcome as it is written. Asked on rank 0 alone."""
        ...

    def take_outcome(self, decision: SyncDecision, outcome: AgreedOutcome) -> None:
        """The outcome is agreed on; this rank carries its commands out next."""
        ...

    def report(self, place: tuple[int, int], status: str, output: Mapping[str, Any]) -> None:
        """This rank has answered the command at that place: the sync point, and its number among the commands."""
        ...

    def end_round(self, number: int, key: str) -> None:
        """A round is over. Nobody reads it who has passed sync point `number`."""
        ...

    def work(self, now: float, own: RankStatus) -> float:
        """Do what else is due; seconds until something is due again."""
        ...

    def is_silent(self, rank: int, now: float) -> bool:
        """Whether a rank that was there does not show itself any more."""
        ...

    def leave(self, number: int) -> bool:
        """Say that this rank ends, before sync point `number`; whether all is heard that is to be waited for."""
        ...

    def abandon(self, reason: str) -> None:
        """Nothing is carried out any more: answer what waits."""
        ...


def outcome_key(place: tuple[int, int]) -> str:
    """Where the ranks enter their outcome of the command at that place: the sync point, and its number there."""
    return f"outcome/{place[0]}/{place[1]}"
