"""Virtual time: hours pass at once, in order, and a deadlock is an error instead of a hang."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import pytest

from trainmedic_server.simulation import virtual_time
from trainmedic_server.simulation.virtual_time import BEGINNING, VirtualClock


def test_a_sleep_of_days_costs_no_real_time() -> None:
    """The clock jumps to the next timer when nothing else is ready."""

    async def scenario() -> timedelta:
        clock = VirtualClock()
        await asyncio.sleep(3 * 86400)
        return clock.now() - BEGINNING

    began = time.monotonic()
    assert virtual_time.run(scenario()) == timedelta(days=3)
    assert time.monotonic() - began < 3600


def test_timers_fire_in_their_order_and_at_their_time() -> None:
    """Tasks that sleep for different times wake in the order of the times, each at its own."""
    woke: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        woke.append((name, asyncio.get_running_loop().time()))

    async def scenario() -> None:
        await asyncio.gather(sleeper("late", 7200), sleeper("early", 0.25), sleeper("middle", 60))

    virtual_time.run(scenario())
    assert woke == [("early", 0.25), ("middle", 60), ("late", 7200)]


def test_a_timeout_ends_what_never_comes() -> None:
    """asyncio.timeout works on virtual time."""

    async def scenario() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert virtual_time.run(scenario()) == pytest.approx(30)


def test_sleeping_until_a_moment_never_returns_before_it() -> None:
    """After sleep_until the clock reads the asked moment or later, to the microsecond, far out too."""

    async def scenario() -> None:
        clock = VirtualClock()
        await asyncio.sleep(0.1)
        for step in range(1, 200):
            when = BEGINNING + timedelta(days=step, microseconds=step * 7919)
            await clock.sleep_until(when)
            assert timedelta(0) <= clock.now() - when < timedelta(milliseconds=1)

    virtual_time.run(scenario())


def test_sleeping_until_the_past_returns_at_once() -> None:
    """A moment that has passed moves no time."""

    async def scenario() -> float:
        clock = VirtualClock()
        await clock.sleep_until(clock.now() - timedelta(hours=1))
        return asyncio.get_running_loop().time()

    assert virtual_time.run(scenario()) == 0


def test_waiting_for_nothing_is_an_error() -> None:
    """Where no timer and no thread is left to wake anything, the run ends with Stalled."""

    async def scenario() -> None:
        await asyncio.Event().wait()

    with pytest.raises(virtual_time.Stalled):
        virtual_time.run(scenario())


def test_work_in_a_thread_is_waited_for() -> None:
    """The clock stands still while a thread works, so a timeout does not overtake it."""
    go = time.monotonic() + 0.05

    def work() -> str:
        while time.monotonic() < go:
            pass
        return "done"

    async def scenario() -> tuple[str, float]:
        async with asyncio.timeout(1):
            result = await asyncio.to_thread(work)
        return result, asyncio.get_running_loop().time()

    assert virtual_time.run(scenario()) == ("done", 0)


async def test_the_loop_serves_pytest_asyncio() -> None:
    """With the conftest's loop factory an async test sleeps for free."""
    before = asyncio.get_running_loop().time()
    await asyncio.sleep(1000)
    assert asyncio.get_running_loop().time() - before == 1000
