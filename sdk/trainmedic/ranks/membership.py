"""Which ranks of a job are there: rank 0 lets each of them in, and knows who lives, where it runs and its figures.

Who calls it: ``coordinator``, in rank 0's background thread; `figures` and `placement` from any thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Mapping

from trainmedic.ranks.role import RankStatus, TrainingPosition
from trainmedic.ranks.rounds import SILENT_AFTER
from trainmedic.ranks.shared_store import SharedStore
from trainmedic.wire.backoff import Backoff

_REFRESH_EVERY = 2.0
_FIRST_WAIT, _LONGEST_WAIT = 0.005, 1.0


@dataclass(frozen=True)
class RankState:
    """What a rank has shown of itself last."""

    heartbeat: int
    passed: int
    """The sync point that its training thread has passed last."""
    about: Mapping[str, Any]
    stats: Mapping[str, Any]
    at: float
    """When that heartbeat was first seen, by rank 0's monotonic clock."""


class Membership:
    """The ranks of the job, as rank 0 knows them. ``base`` has the keys that do not belong to one start of the job."""

    def __init__(self, base: SharedStore, store: SharedStore) -> None:
        self._base = base
        self._store = store
        self.own = RankStatus(0, TrainingPosition(), {}, {})
        """What rank 0 shows of itself."""
        self.others: dict[int, RankState] = {}
        """The other ranks that have been let in."""
        self.hosts: Mapping[int, str] = {}
        """The hosts of the ranks that are known. Replaced whole, because other threads read it."""
        self._nonces: dict[int, str] = {}
        self._backoff = Backoff(_FIRST_WAIT, _LONGEST_WAIT, factor=1.5)
        self._let_in_due = 0.0
        self._refresh_due = 0.0

    def work(self, now: float) -> float:
        """Let in who waits, read the heartbeats; seconds until that is due again."""
        delay = self._let_in(now)
        if now >= self._refresh_due:
            self._refresh_due = now + _REFRESH_EVERY
            for rank in list(self.others):
                self._read_heartbeat(rank, now)
        return min(delay, self._refresh_due - now)

    def absent(self) -> list[int]:
        """The ranks that have not been let in yet."""
        return [rank for rank in range(1, self._base.world_size) if rank not in self.others]

    def is_silent(self, rank: int, now: float) -> bool:
        """Whether a rank that was there does not show itself any more."""
        state = self.others.get(rank)
        return state is not None and now - state.at > SILENT_AFTER

    def passed_by_all(self) -> int:
        """The last sync point that every rank has passed; -1 before all are there."""
        if len(self.others) < self._base.world_size - 1:
            return -1
        return min([self.own.position.number, *(state.passed for state in self.others.values())])

    def figures(self) -> Mapping[int, Mapping[str, Any]]:
        """The latest figures of every rank that lives."""
        now = time.monotonic()
        others = {rank: state.stats for rank, state in list(self.others.items()) if not self.is_silent(rank, now)}
        return {0: self.own.stats, **others}

    def placement(self) -> list[Mapping[str, Any]]:
        """Where each rank runs."""
        others = sorted((rank, state.about) for rank, state in list(self.others.items()))
        return [
            {"rank": rank, "node": about.get("node"), "gpu": about.get("gpu")}
            for rank, about in [(0, self.own.about), *others]
        ]

    def _let_in(self, now: float) -> float:
        """Answer the nonce that a rank has written, until the rank shows itself under our token."""
        absent = self.absent()
        if not absent:
            return _REFRESH_EVERY
        if now < self._let_in_due:
            return self._let_in_due - now
        if self._base.get("current") != self._store.token:
            return _REFRESH_EVERY  # a later start has taken over; the synchronizer is about to find that out
        for rank in absent:
            nonce = self._base.get(f"join/{rank}")
            if nonce is not None and nonce != self._nonces.get(rank):
                self._nonces[rank] = str(nonce)
                self._base.set(f"joined/{nonce}", self._store.token)
                self._backoff.reset()
                self._refresh_due = 0.0
            self._read_heartbeat(rank, now)
        delay = self._backoff.next()
        self._let_in_due = now + delay
        return delay

    def _read_heartbeat(self, rank: int, now: float) -> None:
        status = self._store.get(f"heartbeat/{rank}")
        if status is None:
            return
        before = self.others.get(rank)
        if before is None:
            self._base.delete(f"join/{rank}")
            self._base.delete(f"joined/{self._nonces.get(rank)}")
        at = before.at if before is not None and before.heartbeat == status["heartbeat"] else now
        state = RankState(status["heartbeat"], status["passed"], status["about"], status["stats"], at)
        self.others[rank] = state
        if before is None or before.about != state.about:
            hosts = {other: str(state.about.get("host")) for other, state in self.others.items()}
            self.hosts = {**hosts, 0: str(self.own.about.get("host"))}
