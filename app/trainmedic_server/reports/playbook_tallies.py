"""What the runs of each playbook came to over many days, without counting them all each time.

The store counts a day at a time; a day that is over is remembered for a while, since little of it changes still.
Who calls it: the compiler of reports, and the API's list of playbooks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime, time, timedelta

from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.tallies import PlaybookTally, TallySource

SHOWN = timedelta(days=30)
"""What the list of playbooks counts."""
REMEMBERED = timedelta(minutes=15)
"""How old the counts of a day that is over may be."""
LONG_OVER, LONG_REMEMBERED = timedelta(days=3), timedelta(hours=6)
"""From three days after its end on, little of a day changes: an undo by hand, or a run that was open until then."""
_DAY = timedelta(days=1)
_MOST_REMEMBERED = 400


class PlaybookTallies:
    """Counts by day, and remembers days where it has a clock."""

    def __init__(self, source: TallySource, clock: Clock | None = None) -> None:
        self._source = source
        self._clock = clock
        self._days: dict[datetime, tuple[datetime, Mapping[str, PlaybookTally]]] = {}

    async def of_late(self) -> dict[str, PlaybookTally]:
        """Of the last 30 days, by playbook. Raises StoreUnavailable."""
        now = self._now()
        # From the beginning of a day, so that whole days are counted.
        return await self.between(_day_of(now - SHOWN), now)

    async def between(self, since: datetime, until: datetime) -> dict[str, PlaybookTally]:
        """Of a time, by playbook. Raises StoreUnavailable."""
        totals: dict[str, PlaybookTally] = defaultdict(PlaybookTally)
        begin = since
        while begin < until:
            end = min(_day_of(begin) + _DAY, until)
            for playbook, tally in (await self._part(begin, end)).items():
                totals[playbook].add(tally)
            begin = end
        return dict(totals)

    def _now(self) -> datetime:
        return self._clock.now() if self._clock is not None else datetime.now(UTC)

    async def _part(self, begin: datetime, end: datetime) -> Mapping[str, PlaybookTally]:
        now = self._now()
        if self._clock is None or begin != _day_of(begin) or end - begin != _DAY or end > now:
            return await self._source.tally(begin, end)
        counted_at, counted = self._days.get(begin, (None, {}))
        good_for = LONG_REMEMBERED if now - end > LONG_OVER else REMEMBERED
        if counted_at is None or not timedelta(0) <= now - counted_at < good_for:
            counted = await self._source.tally(begin, end)
            self._days.pop(begin, None)
            self._days[begin] = now, counted
            while len(self._days) > _MOST_REMEMBERED:
                del self._days[next(iter(self._days))]
        return counted


def _day_of(moment: datetime) -> datetime:
    return datetime.combine(moment.astimezone(UTC).date(), time(), UTC)
