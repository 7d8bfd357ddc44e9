"""One reader of presences for several loops."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.clocks import START
from trainmedic_server.engine.shared_presences import FRESH_FOR, SharedPresences
from trainmedic_server.errors import BusUnavailable
from trainmedic_server.ports.outside import Presence


class Source:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.is_away = False

    async def jobs(self) -> list[Presence]:
        self.asked += 1
        await asyncio.sleep(0)
        if self.is_away:
            raise BusUnavailable("Redis is away")
        return [Presence(f"job-{self.asked}", START)]

    launchers = agents = jobs


async def test_loops_that_look_together_cost_one_look() -> None:
    """Also while it is under way; the next round reads again."""
    source, now = Source(), 0.0
    shared = SharedPresences(source, lambda: now)  # type: ignore[arg-type]
    looks = await asyncio.gather(*(shared.jobs() for _ in range(3)))
    assert ([[each.name for each in look] for look in looks], source.asked) == ([["job-1"]] * 3, 1)
    now = FRESH_FOR
    assert [each.name for each in await shared.jobs()] == ["job-2"]
    await shared.agents()
    assert source.asked == 3


async def test_people_see_who_is_there_now_though_a_loop_has_just_read() -> None:
    """Where reading takes a moment only."""
    source = Source()
    shared = SharedPresences(source, lambda: 0.0)  # type: ignore[arg-type]
    assert [each.name for each in await shared.jobs()] == ["job-1"]
    assert [each.name for each in await shared.recent_jobs()] == ["job-2"]
    assert [each.name for each in await shared.jobs()] == ["job-2"]


async def test_people_are_shown_the_last_of_what_takes_long_to_read() -> None:
    """For some seconds, while the loops read on; what is read in a moment is read for them too."""
    source, now = Source(), 0.0
    shared = SharedPresences(source, lambda: now)  # type: ignore[arg-type]
    await shared.recent_jobs()
    now = 100.0
    assert [each.name for each in await shared.recent_jobs()] == ["job-2"]

    async def slow() -> list[Presence]:
        nonlocal now
        now += 1.0
        return await Source.jobs(source)

    source.agents = slow  # type: ignore[method-assign]
    shared = SharedPresences(source, lambda: now)  # type: ignore[arg-type]
    first = await shared.recent_agents()
    now += 14.0
    assert await shared.recent_agents() is first
    now += 1.0
    assert await shared.recent_agents() is not first


async def test_a_failure_is_told_to_each_and_not_kept() -> None:
    """The next one asks again, and what was read before is not taken for what is there."""
    source = Source()
    source.is_away = True
    shared = SharedPresences(source, lambda: 0.0)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(BusUnavailable):
            await shared.jobs()
    source.is_away = False
    assert len(await shared.jobs()) == 1


async def test_who_waits_together_is_told_of_one_failure() -> None:
    """While Redis does not answer, those who ask would hold up one another otherwise, for as long as each try takes."""
    source = Source()
    source.is_away = True
    shared = SharedPresences(source, lambda: 0.0)  # type: ignore[arg-type]
    told = await asyncio.gather(*(shared.jobs() for _ in range(3)), return_exceptions=True)
    assert ([type(each) for each in told], source.asked) == ([BusUnavailable] * 3, 1)


async def test_who_gives_up_ends_the_reading_of_nobody_else() -> None:
    """As a person whose browser has gone."""
    source = Source()
    shared = SharedPresences(source, lambda: 0.0)  # type: ignore[arg-type]
    gone, other = asyncio.create_task(shared.jobs()), asyncio.create_task(shared.jobs())
    await asyncio.sleep(0)
    gone.cancel()
    assert [each.name for each in await other] == ["job-1"]
    assert (gone.cancelled(), source.asked) == (True, 1)
