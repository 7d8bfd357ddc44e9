"""Background loops that survive failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

from trainmedic.wire.backoff import Backoff
from trainmedic_server import errors, telemetry
from trainmedic_server.ports.outside import Clock

Sleep = Callable[[float], Awaitable[object]]  # takes seconds

log = telemetry.logger(__name__)


def sleeping_by(clock: Clock) -> Sleep:
    return lambda seconds: clock.sleep_until(clock.now() + timedelta(seconds=seconds))


async def repeat(
    work: Callable[[], Awaitable[object]],
    every: timedelta,
    name: str,
    metrics: telemetry.Metrics,
    *,
    retries: Backoff | None = None,
    sleep: Sleep = asyncio.sleep,
) -> None:
    """Call `work` at this interval until cancelled, and again at once while it returns a true value.

    Failures are retried after `every`, or by `retries`. Outages are logged once, unexpected errors each time and
    counted.
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
                    log.info("background loop recovered", loop=name)
                is_failing = False
        except Exception as error:  # one failure must not end the loop
            wait = retries.next() if retries is not None else wait
            if not isinstance(error, errors.TrainmedicError):
                metrics.loop_errors.labels(name).inc()
                log.exception("background loop failed; retrying", loop=name, retry_in=wait)
            elif not is_failing:
                log.warning("background loop delayed; retrying", loop=name, error=str(error), retry_in=wait)
            is_failing = True
        await sleep(wait)
