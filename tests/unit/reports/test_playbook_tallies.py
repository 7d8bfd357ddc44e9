"""Days that are over are counted once in a while, the present one each time."""

from __future__ import annotations

from datetime import datetime, timedelta

from tests.support.clocks import START, ManualClock
from trainmedic_server.domain.run import Status
from trainmedic_server.ports.tallies import PlaybookTally
from trainmedic_server.reports.playbook_tallies import PlaybookTallies


class Counted:
    """One run a day; remembers which times were counted."""

    def __init__(self) -> None:
        self.asked: list[tuple[datetime, datetime]] = []

    async def tally(self, since: datetime, until: datetime) -> dict[str, PlaybookTally]:
        self.asked.append((since, until))
        tally = PlaybookTally()
        tally.statuses[Status.SUCCEEDED] = 1
        return {"cool": tally}

    async def effects_between(self, since: datetime, until: datetime, limit: int) -> dict[str, object]:
        raise AssertionError("not asked here")


async def test_a_day_that_is_over_is_counted_once_in_a_quarter_of_an_hour() -> None:
    """Today's part is counted each time; the sum is that of 30 days and today."""
    clock, source = ManualClock(START), Counted()
    tallies = PlaybookTallies(source, clock)  # type: ignore[arg-type]
    assert (await tallies.of_late())["cool"].started == 31
    assert len(source.asked) == 31
    assert source.asked[0][0] == datetime(2026, 1, 1, tzinfo=START.tzinfo)
    assert source.asked[-1] == (START.replace(hour=0), START)
    clock.sleep(60)
    assert (await tallies.of_late())["cool"].started == 31
    assert len(source.asked) == 32
    clock.sleep(15 * 60)
    await tallies.of_late()
    assert len(source.asked) == 32 + 3 + 1, "the days that ended less than three days ago, and today"
    clock.sleep(6 * 3600)
    await tallies.of_late()
    assert len(source.asked) == 36 + 31


async def test_a_time_that_begins_within_a_day_is_counted_exactly() -> None:
    """Its first and last parts are no whole days, and are not remembered."""
    source = Counted()
    begin, end = START - timedelta(days=1), START
    await PlaybookTallies(source, ManualClock(START)).between(begin, end)  # type: ignore[arg-type]
    assert source.asked == [(begin, START.replace(hour=0)), (START.replace(hour=0), end)]
