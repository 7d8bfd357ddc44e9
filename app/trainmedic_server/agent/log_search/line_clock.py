"""The times of the lines of one file, in their order.

A line that states its time has that, unless the file shows that it cannot: it arrived long before or after. A line
that states none lies between the lines around it that do, and within the time in which its bytes arrived in the file,
as far as the agent has looked (``log_reading.arrivals``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import NamedTuple

from trainmedic_server.agent.log_reading.arrivals import Arrival, FileArrivals
from trainmedic_server.domain.log_search import TimeKnownBy
from trainmedic_server.logs import line_times
from trainmedic_server.logs.line_times import AHEAD, Lacks, Stated

BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)
SLACK = timedelta(seconds=60)
"""Lines of a file may be so far out of order: several processes write it."""
_BEHIND = timedelta(hours=24)
"""A line that states a time so long before it arrived states that of something else."""
_NARROW = timedelta(minutes=15)
"""What arrived within so long is used to fill in a year, a date, or the hour that summer time repeats."""
_WEAK = timedelta(minutes=15)
_EXACT = timedelta(seconds=2)
"""A time that is known so well counts as known."""
_QUARTER = timedelta(minutes=15)
"""All zones are whole quarters of an hour from UTC."""
_LATE, _EARLY = timedelta(seconds=60), timedelta(seconds=5)
_MOST_OFFSET = 14 * 4
_LEAST_VOTES = 3


class LineTime(NamedTuple):
    """When a line was written."""

    at: datetime
    known_by: TimeKnownBy
    earliest: datetime | None = None
    """It was not written before that, where it states no time; None where no bound is known."""
    error: float | None = None
    """Seconds between `at` and the bound that is farther away."""
    is_vague: bool = False
    """`earliest` and `at` are farther apart than a search can overlook, and no line around it states a time."""


class LineClock:
    """Tells the time of each line. Lines come in the order of the file."""

    def __init__(
        self,
        written_at: datetime,
        *,
        arrivals: FileArrivals | None = None,
        born_at: datetime | None = None,
        zone: tzinfo | None = None,
    ) -> None:
        """`zone` is that of times that state none; None is this machine's. `written_at`, `born_at`: the file's."""
        first_at = arrivals.first_at if arrivals is not None else None
        if first_at is not None and born_at is not None and first_at < born_at - _EARLY:
            arrivals = None  # they are of another file, which had this inode before
        self.arrivals = arrivals
        self.latest = BEGINNING
        """The latest time of a line so far."""
        self.before = BEGINNING
        """The time that the last line which states one states."""
        self.goes_back = False
        """Whether a line states a time that is before that of earlier lines."""
        self._written_at = written_at
        self._born_at = born_at
        self._zone = zone
        self._is_learned = False
        self._arrival = Arrival(None, written_at)
        self._arrival_begin = self._arrival_end = -1

    def learn_zone(self, lines: Iterable[tuple[int, Stated]]) -> None:
        """Find the zone of the times without one by the arrival of lines: a container may have another than its node.

        `lines` are where some lines end, and what they state.
        """
        votes: Counter[int] = Counter()
        for end, stated in lines:
            arrival = self._arrived(end)
            if arrival.after is None or arrival.at - arrival.after > _EXACT or self.arrivals is None:
                continue
            if stated.has_zone or stated.lacks is Lacks.DATE:
                continue
            wall = line_times.moment(stated, UTC, arrival.at + _QUARTER * _MOST_OFFSET, arrival.at)
            if wall is None:
                continue
            quarters = round((wall - arrival.at) / _QUARTER)
            rest = wall - arrival.at - quarters * _QUARTER
            if abs(quarters) <= _MOST_OFFSET and -_LATE <= rest <= _EARLY:
                votes[quarters] += 1
        if not votes:
            return
        quarters, count = votes.most_common(1)[0]
        offset = self._written_at.astimezone(self._zone).utcoffset()
        if count >= _LEAST_VOTES and count * 5 >= votes.total() * 4 and offset != quarters * _QUARTER:
            self._zone = timezone(quarters * _QUARTER)
            self._is_learned = True

    def stated_at(self, end: int, at: datetime | None, stated: Stated | None) -> tuple[datetime, TimeKnownBy] | None:
        """The time that the line which ends at `end` states, and how it is known; None where it states none that can
        be its own. `at` is one with a zone that its reader was sure of."""
        if at is None and stated is None:
            return None
        arrival = self._arrived(end)
        is_narrow = arrival.after is not None and arrival.at - arrival.after <= _NARROW
        known_by = TimeKnownBy.LINE
        if at is None and stated is not None:
            before = self.before if self.before != BEGINNING else None
            at = line_times.moment(stated, self._zone, arrival.at, arrival.at if is_narrow else before)
            if not stated.has_zone:
                known_by = TimeKnownBy.ARRIVAL_ZONE if self._is_learned else TimeKnownBy.NODE_ZONE
            if at is not None and stated.is_weak and not (is_narrow and abs(at - arrival.at) <= _WEAK):
                return None
        if at is None or at > arrival.at + AHEAD:
            return None
        if self.arrivals is not None and arrival.after is not None and at < arrival.after - _BEHIND:
            return None
        return at, known_by

    def stating(self, at: datetime, known_by: TimeKnownBy) -> LineTime:
        """The next line states this time."""
        self.goes_back = self.goes_back or at < self.latest - SLACK
        self.latest = max(self.latest, at)
        self.before = at
        return LineTime(at, known_by)

    def stating_none(self, end: int, following: datetime | None) -> LineTime:
        """The next line, which ends at `end`, states no time; `following` is what the next one states that does."""
        arrival = self._arrived(end)
        moment = self._between(arrival, following if following is None or following >= self.before else None)
        self.latest = max(self.latest, moment.at)
        return moment

    def _between(self, arrival: Arrival, following: datetime | None) -> LineTime:
        before = self.before if self.before != BEGINNING else None
        after = arrival.after if arrival.after is not None else self._born_at
        if self.arrivals is None:
            if before is not None or following is not None:
                at = before or following or arrival.at
                error = (following - before).total_seconds() if before and following else None
                return LineTime(at, TimeKnownBy.NEIGHBOURS, before, error)
            return self._arrival_moment(arrival.at, after, TimeKnownBy.FILE)
        if before is not None and (after is None or before >= after):
            # It follows a line that was written in the same while, as the lines of a traceback do.
            bound = min(following, max(arrival.at, before)) if following is not None else max(arrival.at, before)
            return LineTime(before, TimeKnownBy.NEIGHBOURS, before, (bound - before).total_seconds())
        if before is not None and following is not None and after is not None and following < after - _EXACT:
            # The program kept its output back, so that lines arrived long after they were written. Not a time in whole
            # seconds, which can be a little earlier than the line.
            return LineTime(before, TimeKnownBy.NEIGHBOURS, before, (following - before).total_seconds())
        if following is not None and following < arrival.at:
            begin = max((each for each in (before, after) if each is not None), default=None)
            at = following if begin is None else max(following, begin)
            return LineTime(at, TimeKnownBy.NEIGHBOURS, begin, (at - begin).total_seconds() if begin else None)
        return self._arrival_moment(arrival.at, after, TimeKnownBy.ARRIVAL)

    def _arrival_moment(self, at: datetime, after: datetime | None, known_by: TimeKnownBy) -> LineTime:
        if after is None or after > at:
            return LineTime(at, known_by)
        return LineTime(at, known_by, after, (at - after).total_seconds(), at - after > _EXACT)

    def _arrived(self, end: int) -> Arrival:
        """When the last byte of a line arrived."""
        place = max(end - 1, 0)
        if self.arrivals is None:
            return self._arrival
        if not self._arrival_begin <= place < self._arrival_end:
            self._arrival = self.arrivals.of(place, self._written_at)
            self._arrival_begin, self._arrival_end = place, self._arrival.until
        return self._arrival
