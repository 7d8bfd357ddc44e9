"""Work that is done again and again for as long as the server works, whatever one round of it runs into.

Who calls it: whatever in the engine looks for something every few seconds, and ``wiring``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

from trainmedic.wire.backoff import Backoff
from trainmedic_server import errors, telemetry
from trainmedic_server.ports.outside import Clock

Rest = Callable[[float], Awaitable[object]]
"""Waits so many seconds, or less where there is something to do."""

log = telemetry.logger(__name__)


def by_clock(clock: Clock) -> Rest:
    """Waits by the server's clock, as what a simulation has to jump over does."""
    return lambda seconds: clock.sleep_until(clock.now() + timedelta(seconds=seconds))


async def repeat(
    work: Callable[[], Awaitable[object]],
    every: timedelta,
    name: str,
    metrics: telemetry.Metrics,
    *,
    retries: Backoff | None = None,
    rest: Rest = asyncio.sleep,
) -> None:
    """Do `work` every `every`, until cancelled; at once again while it returns that there was something to do.

    A round that fails ends nothing: it is tried again after `every`, or as `retries` says. An outage is logged when it
    begins and when it is over; an unexpected error each time, and counted.
    """
    is_failing = False
    while True:
        wait = every.total_seconds()
        try:
            has_more: object = True
            while has_more:
                has_more = await work()
                if retries is not None:
                    retries.reset()
                if is_failing:
                    log.info("a background loop goes on", loop=name)
                is_failing = False
        except Exception as error:  # the boundary of a loop: what is wrong with one thing must not end the work
            wait = retries.next() if retries is not None else wait
            if not isinstance(error, errors.TrainmedicError):
                metrics.loop_errors.labels(name).inc()
                log.exception("a background loop failed; trying again", loop=name, retry_in=wait)
            elif not is_failing:
                log.warning("a background loop is held up; trying again", loop=name, error=str(error), retry_in=wait)
            is_failing = True
        await rest(wait)
