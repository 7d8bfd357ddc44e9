"""How long ago something was, although the clock may have been set and the server been down in between.

`Timeline` knows the gaps in the time of day (`domain.time_gaps`): those that the store has, the one since the last
heartbeat of an earlier server, and those that it notices itself, because the time has gone further between two looks
than a heartbeat can take. The heartbeat writes them down.

Who calls it: ``service`` makes it and keeps it; whoever decides that something is old enough asks it. Not here: the
clock (`ports.outside.Clock`), which follows that of the machine with care.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from datetime import datetime, timedelta

from trainmedic_server.domain import time_gaps
from trainmedic_server.domain.time_gaps import SHORTEST, Ago, TimeGap
from trainmedic_server.ports.outside import Clock

HEARTBEAT = timedelta(seconds=10)
"""How often the server notes that it is alive; a restart's downtime is known to within this."""


class Timeline:
    """The gaps in the time of day. Any thread may ask. Until `begin` none is noticed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._gaps: list[TimeGap] = []
        self._unwritten: list[TimeGap] = []
        self._looked_at: datetime | None = None
        self._set_back_by = timedelta(0)

    def begin(self, gaps: Sequence[TimeGap], alive_at: datetime | None) -> None:
        """Begin with what the store knows: the gaps, and when a server was last alive."""
        with self._lock:
            now = self._clock.now()
            self._gaps, self._unwritten, self._looked_at = list(gaps), [], now
            if alive_at is not None:
                self._look_from(alive_at, now, is_downtime=True)

    def ago(self, span: timedelta) -> datetime:
        """The moment that lies `span` back, not counting the time in which no server was at work: for what is
        forgotten, or assumed, because nothing was heard of it for so long."""
        now, gaps = self._look()
        return time_gaps.ago(now, span, gaps)

    def by_clock(self) -> Ago:
        """Returns the moment that lies a span back from now, also over downtimes, but not over what the clock was set
        forward by: for guards, whose time passes while no server is up."""
        now, gaps = self._look()
        return functools.partial(time_gaps.ago, now, gaps=[gap for gap in gaps if not gap.is_downtime])

    def set_forward_since(self, moment: datetime) -> timedelta:
        """By how much the clock was set forward after `moment`."""
        now, gaps = self._look()
        later = (gap.length for gap in gaps if not gap.is_downtime and moment < gap.ended_at <= now)
        return sum(later, timedelta(0))

    def idle_since(self, moment: datetime) -> timedelta:
        """How much of the time of day after `moment` was none in which a server was at work."""
        now, gaps = self._look()
        return sum((gap.length for gap in gaps if moment < gap.ended_at <= now), timedelta(0))

    def take_unwritten(self) -> list[TimeGap]:
        """Return the gaps that were noticed since this was last asked."""
        self._look()
        with self._lock:
            unwritten, self._unwritten = self._unwritten, []
        return unwritten

    def take_set_back(self) -> timedelta:
        """Return by how much the clock was set back since this was last asked."""
        self._look()
        with self._lock:
            by, self._set_back_by = self._set_back_by, timedelta(0)
        return by

    def _look(self) -> tuple[datetime, tuple[TimeGap, ...]]:
        """The time, and every gap until now."""
        with self._lock:
            now = self._clock.now()
            if self._looked_at is not None:
                self._look_from(self._looked_at, now, is_downtime=False)
            return now, tuple(self._gaps)

    def _look_from(self, before: datetime, now: datetime, *, is_downtime: bool) -> None:
        passed, self._looked_at = now - before, now
        if passed > SHORTEST + (timedelta(0) if is_downtime else HEARTBEAT):
            gap = TimeGap(now, passed, is_downtime)
            self._gaps.append(gap)
            self._unwritten.append(gap)
        elif passed < -SHORTEST:
            self._set_back_by -= passed
