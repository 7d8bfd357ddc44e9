"""Elapsed time despite gaps in the wall clock (`domain.time_gaps`).

The gaps are stored ones, the downtime since the last heartbeat, and jumps that it detects.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from datetime import datetime, timedelta

from trainmedic_server.domain import time_gaps
from trainmedic_server.domain.time_gaps import SHORTEST, Ago, TimeGap
from trainmedic_server.ports.outside import Clock

HEARTBEAT = timedelta(seconds=10)  # between two heartbeats


class Timeline:
    """Thread-safe. Detection starts with `begin`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._gaps: list[TimeGap] = []
        self._unwritten: list[TimeGap] = []
        self._looked_at: datetime | None = None
        self._set_back_by = timedelta(0)

    def begin(self, gaps: Sequence[TimeGap], alive_at: datetime | None) -> None:
        with self._lock:
            now = self._clock.now()
            self._gaps, self._unwritten, self._looked_at = list(gaps), [], now
            if alive_at is not None:
                self._look_from(alive_at, now, is_downtime=True)

    def ago(self, span: timedelta) -> datetime:
        """Return the time `span` back, excluding downtimes: for retention and for silence."""
        now, gaps = self._look()
        return time_gaps.ago(now, span, gaps)

    def by_clock(self) -> Ago:
        """Return a function like `ago` that includes downtimes, but not forward clock steps: for guards."""
        now, gaps = self._look()
        return functools.partial(time_gaps.ago, now, gaps=[gap for gap in gaps if not gap.is_downtime])

    def set_forward_since(self, moment: datetime) -> timedelta:
        now, gaps = self._look()
        later = (gap.length for gap in gaps if not gap.is_downtime and moment < gap.ended_at <= now)
        return sum(later, timedelta(0))

    def was_skipped(self, moment: datetime) -> bool:
        now, gaps = self._look()
        jumps = (gap for gap in gaps if not gap.is_downtime and gap.ended_at <= now)
        return any(gap.ended_at - gap.length < moment <= gap.ended_at for gap in jumps)

    def idle_since(self, moment: datetime) -> timedelta:
        now, gaps = self._look()
        return sum((gap.length for gap in gaps if moment < gap.ended_at <= now), timedelta(0))

    def take_unwritten(self) -> list[TimeGap]:
        self._look()
        with self._lock:
            unwritten, self._unwritten = self._unwritten, []
        return unwritten

    def take_set_back(self) -> timedelta:
        self._look()
        with self._lock:
            by, self._set_back_by = self._set_back_by, timedelta(0)
        return by

    def _look(self) -> tuple[datetime, tuple[TimeGap, ...]]:
        with self._lock:
            now = self._clock.now()
            if self._looked_at is not None:
                self._look_from(self._looked_at, now, is_downtime=False)
            return now, tuple(self._gaps)

    def _look_from(self, before: datetime, now: datetime, *, is_downtime: bool) -> None:
        passed, self._looked_at = now - before, now
        # A running server looks at least at each heartbeat.
        if passed > SHORTEST + (timedelta(0) if is_downtime else HEARTBEAT):
            gap = TimeGap(now, passed, is_downtime)
            self._gaps.append(gap)
            self._unwritten.append(gap)
        elif passed < -SHORTEST:
            self._set_back_by -= passed
