"""Ranks as rank 0 knows them: admission, heartbeats and figures."""

from __future__ import annotations

import time
from typing import Any, Mapping

from trainmedic.ranks.rank_state import RankStatus
from trainmedic.ranks.rounds import SILENT_AFTER
from trainmedic.ranks.shared_store import SharedStore
from trainmedic.wire.backoff import Backoff

_REFRESH_INTERVAL = 2.0  # seconds between two reads of all heartbeats
_FIRST_WAIT, _LONGEST_WAIT = 0.005, 1.0  # seconds between two reads of absent ranks' requests to join


class Membership:
    """Ranks of this start. ``base`` has the keys common to all starts.

    Any thread may call `figures` and `placement`.
    """

    def __init__(self, base: SharedStore, store: SharedStore) -> None:
        self._base = base
        self._store = store
        self.own = RankStatus()
        self.others: dict[int, RankStatus] = {}
        self._seen_at: dict[int, float] = {}  # when the heartbeat was first seen, by the monotonic clock
        self.hosts: Mapping[int, str] = {}  # by rank
        self._nonces: dict[int, str] = {}  # the last answered request to join, by rank
        self._backoff = Backoff(_FIRST_WAIT, _LONGEST_WAIT, factor=1.5)
        self._admit_due = 0.0
        self._refresh_due = 0.0

    def work(self, now: float) -> float:
        """Admit new ranks and read due heartbeats; return the seconds until the next call."""
        delay = self._admit(now)
        if now >= self._refresh_due:
            self._refresh_due = now + _REFRESH_INTERVAL
            for rank in list(self.others):
                self._read_heartbeat(rank, now)
        return min(delay, self._refresh_due - now)

    def absent(self) -> list[int]:
        return [rank for rank in range(1, self._base.world_size) if rank not in self.others]

    def is_silent(self, rank: int, now: float) -> bool:
        return now - self._seen_at.get(rank, now) > SILENT_AFTER

    def passed_by_all(self) -> int:
        """Return the last sync point that all have passed; -1 while a rank is absent."""
        if len(self.others) < self._base.world_size - 1:
            return -1
        return min([self.own.passed, *(status.passed for status in self.others.values())])

    def figures(self) -> Mapping[int, Mapping[str, Any]]:
        now = time.monotonic()
        others = {rank: status.stats for rank, status in list(self.others.items()) if not self.is_silent(rank, now)}
        return {0: self.own.stats, **others}

    def placement(self) -> list[Mapping[str, Any]]:
        about = {0: self.own.about, **{rank: status.about for rank, status in list(self.others.items())}}
        return [
            {"rank": rank, "node": about[rank].get("node"), "gpu": about[rank].get("gpu")} for rank in sorted(about)
        ]

    def _admit(self, now: float) -> float:
        # Admit ranks that ask to join; return the seconds until the next call.
        absent = self.absent()
        if not absent:
            return _REFRESH_INTERVAL
        if now < self._admit_due:
            return self._admit_due - now
        if self._base.get("current") != self._store.token:
            return _REFRESH_INTERVAL  # a later start has taken over; the synchronizer will notice
        for rank in absent:
            nonce = self._base.get(f"join/{rank}")
            if nonce is not None and nonce != self._nonces.get(rank):
                self._nonces[rank] = str(nonce)
                self._base.set(f"joined/{nonce}", self._store.token)
                self._backoff.reset()
                self._refresh_due = 0.0
            self._read_heartbeat(rank, now)
        delay = self._backoff.next()
        self._admit_due = now + delay
        return delay

    def _read_heartbeat(self, rank: int, now: float) -> None:
        fields = self._store.get(f"heartbeat/{rank}")
        if fields is None:
            return
        status = RankStatus(**fields)
        before = self.others.get(rank)
        if before is None:
            self._base.delete(f"join/{rank}")
            self._base.delete(f"joined/{self._nonces.get(rank)}")
        if before is None or before.heartbeat != status.heartbeat:
            self._seen_at[rank] = now
        self.others[rank] = status
        if before is None or before.about != status.about:
            hosts = {other: str(shown.about.get("host")) for other, shown in self.others.items()}
            self.hosts = {**hosts, 0: str(self.own.about.get("host"))}
