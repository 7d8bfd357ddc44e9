"""Record of data that budgets dropped, for presence and metrics. Thread-safe."""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

from msgspec import Struct

from trainmedic_agent.log_reading.budgets import BudgetOwner
from trainmedic_logs.domain.log_cuts import LONGEST_JOB, MOST_REPORTED, CutKind, LogCut

FORGOTTEN_AFTER = 600.0  # seconds without a cut
_MOST_KEPT = 2000  # entries


class _Entry(Struct):
    count: int
    since: datetime  # first cut
    seen: float  # monotonic time of the last one


class CutRecord:
    def __init__(self, now: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._entries: dict[tuple[BudgetOwner, CutKind], _Entry] = {}
        self._totals: Counter[CutKind] = Counter()

    def add(self, owner: BudgetOwner, what: CutKind, count: int = 1) -> None:
        """Add to a cut's count, unless 0."""
        if count > 0:
            self._put(owner, what, count, is_sum=True)

    def set_count(self, owner: BudgetOwner, what: CutKind, count: int) -> None:
        """Set the count of a cut that each scan finds, unless 0."""
        if count > 0:
            self._put(owner, what, count, is_sum=False)

    def totals(self) -> dict[str, int]:
        """Return how often data was dropped, by kind."""
        with self._lock:
            return {kind.value: self._totals[kind] for kind in CutKind}

    def cuts(self) -> list[LogCut]:
        """Return the latest cuts of each kind, without the node."""
        with self._lock:
            self._forget()
            by_kind: dict[CutKind, list[tuple[BudgetOwner, _Entry]]] = {}
            for (owner, what), entry in self._entries.items():
                by_kind.setdefault(what, []).append((owner, entry))
        most_of_kind = max(MOST_REPORTED // max(len(by_kind), 1), 1)
        return [
            LogCut("", owner.job and owner.job[:LONGEST_JOB], owner.uid, what, entry.count, entry.since)
            for what, entries in sorted(by_kind.items())
            for owner, entry in heapq.nlargest(most_of_kind, entries, key=lambda item: (item[1].seen, item[1].count))
        ]

    def _put(self, owner: BudgetOwner, what: CutKind, count: int, *, is_sum: bool) -> None:
        monotonic = self._monotonic()
        with self._lock:
            self._totals[what] += 1
            entry = self._entries.get((owner, what))
            if entry is None or monotonic - entry.seen > FORGOTTEN_AFTER:
                if len(self._entries) >= _MOST_KEPT:
                    self._forget()
                entry = self._entries[owner, what] = _Entry(0, datetime.fromtimestamp(self._now(), UTC), monotonic)
            entry.count = entry.count + count if is_sum else count
            entry.seen = monotonic

    def _forget(self) -> None:
        ends = self._monotonic() - FORGOTTEN_AFTER
        self._entries = {key: entry for key, entry in self._entries.items() if entry.seen >= ends}
        if len(self._entries) >= _MOST_KEPT:
            newest = heapq.nlargest(_MOST_KEPT // 2, self._entries.items(), key=lambda item: item[1].seen)
            self._entries = dict(newest)
