"""The machine's clock as a port."""

from __future__ import annotations

import asyncio
from datetime import UTC, timedelta

from trainmedic_server.adapters.system_clock import SystemClock


def test_times_are_aware_and_in_utc() -> None:
    """Everything in the store is UTC; a naive time would be read in the machine's zone."""
    assert SystemClock().now().tzinfo is UTC


async def test_a_moment_that_has_passed_is_not_waited_for() -> None:
    """A deadline from before a restart is due at once."""
    clock = SystemClock()
    async with asyncio.timeout(60):
        await clock.sleep_until(clock.now() - timedelta(days=1))


async def test_waiting_ends_no_earlier_than_asked() -> None:
    """A wait that ended early would find its deadline not yet passed."""
    clock = SystemClock()
    until = clock.now() + timedelta(milliseconds=5)
    await clock.sleep_until(until)
    assert clock.now() >= until
