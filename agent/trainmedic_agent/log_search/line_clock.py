"""Times of a file's lines, in order.

A line has the time it states, unless it arrived long before or after. A line without one is between its timed
neighbours, and within the arrival interval of its bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import NamedTuple

from trainmedic_agent.log_reading.arrivals import Arrival, FileArrivals
from trainmedic_logs.domain.log_search import TimeKnownBy
from trainmedic_logs.lines import line_times
from trainmedic_logs.lines.line_times import AHEAD, Lacks, Stated

BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)
SLACK = timedelta(seconds=60)  # disorder if several processes write
_BEHIND = timedelta(hours=24)  # a time this long before arrival is not the line's own
_NARROW = timedelta(minutes=15)  # an arrival this precise completes a time without year or date
_WEAK = timedelta(minutes=15)  # digits that may be no time must be this close to the arrival
_EXACT = timedelta(seconds=2)  # error of an exact time
_ZONE_STEP = timedelta(minutes=15)
# When a zone is detected, a line may arrive this much after, or before, the time that it states.
_LATE, _EARLY = timedelta(seconds=60), timedelta(seconds=5)
_MOST_STEPS = 14 * 4  # zones are at most 14 hours from UTC
_LEAST_VOTES = 3  # lines that must agree on a zone


class LineTime(NamedTuple):
    at: datetime
    known_by: TimeKnownBy
    earliest: datetime | None = None
    """Lower bound; None if unknown."""
    error: float | None = None
    """Seconds between `at` and the farther bound. None if stated or unknown."""
    is_vague: bool = False
    """True if only an interval of arrival over 2 s is known."""


class LineClock:
    def __init__(
        self,
        written_at: datetime,
        *,
        arrivals: FileArrivals | None = None,
        born_at: datetime | None = None,
        zone: tzinfo | None = None,
    ) -> None:
        """`zone` applies to times without one; None is this machine's."""
        first_at = arrivals.first_at if arrivals is not None else None
        if first_at is not None and born_at is not None and first_at < born_at - _EARLY:
            arrivals = None  # of an earlier file with this inode
        self.arrivals = arrivals
        self.latest = BEGINNING  # latest time so far
        self.before = BEGINNING  # last stated time
        self.goes_back = False  # True if times were out of order by more than `SLACK`
        self._written_at = written_at
        self._born_at = born_at
        self._zone = zone
        self._is_learned = False  # True if `_zone` comes from `learn_zone`
        self._arrival = Arrival(None, written_at)  # without `arrivals`, that of all lines
        self._arrival_begin = self._arrival_end = -1

    def learn_zone(self, lines: Iterable[tuple[int, Stated]]) -> None:
        """Detect the zone of times without one: a container's may differ from its node's.

        `lines`: end offsets with stated times.
        """
        votes: Counter[int] = Counter()
        for end, stated in lines:
            arrival = self._arrived(end)
            if arrival.after is None or arrival.at - arrival.after > _EXACT or self.arrivals is None:
                continue
            if stated.has_zone or stated.lacks is Lacks.DATE:
                continue
            wall = line_times.moment(stated, UTC, arrival.at + _ZONE_STEP * _MOST_STEPS, arrival.at)
            if wall is None:
                continue
            steps = round((wall - arrival.at) / _ZONE_STEP)
            rest = wall - arrival.at - steps * _ZONE_STEP
            if abs(steps) <= _MOST_STEPS and -_LATE <= rest <= _EARLY:
                votes[steps] += 1
        if not votes:
            return
        steps, count = votes.most_common(1)[0]
        offset = self._written_at.astimezone(self._zone).utcoffset()
        is_clear = count >= _LEAST_VOTES and count >= 0.8 * votes.total()
        if is_clear and offset != steps * _ZONE_STEP:
            self._zone = timezone(steps * _ZONE_STEP)
            self._is_learned = True

    def stated_at(self, end: int, at: datetime | None, stated: Stated | None) -> tuple[datetime, TimeKnownBy] | None:
        """Return the plausible time stated by the line ending at `end`, if any, and how it is known.

        `at`: a time with a certain zone; `stated`: another one.
        """
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

    def time_stated(self, at: datetime, known_by: TimeKnownBy) -> LineTime:
        """Return the next line's time, which `stated_at` has returned."""
        self.goes_back = self.goes_back or at < self.latest - SLACK
        self.latest = max(self.latest, at)
        self.before = at
        return LineTime(at, known_by)

    def time_without(self, end: int, following: datetime | None) -> LineTime:
        """Return the next line's time, which it does not state. `following`: the file's next stated time."""
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
            # The previous timed line is from the same interval, as for a traceback.
            bound = min(following, max(arrival.at, before)) if following is not None else max(arrival.at, before)
            return LineTime(before, TimeKnownBy.NEIGHBOURS, before, (bound - before).total_seconds())
        if before is not None and following is not None and after is not None and following < after - _EXACT:
            # Buffered output arrived long after it was written. A time in whole seconds can be slightly before its
            # line, so it does not prove that.
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
        place = max(end - 1, 0)
        if self.arrivals is None:
            return self._arrival
        if not self._arrival_begin <= place < self._arrival_end:
            self._arrival = self.arrivals.of(place, self._written_at)
            self._arrival_begin, self._arrival_end = place, self._arrival.until
        return self._arrival
