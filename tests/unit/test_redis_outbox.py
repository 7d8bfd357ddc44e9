"""Commands that a server may not send."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis
from structlog.testing import capture_logs

from tests.support.clocks import ManualClock
from trainmedic_server.adapters.redis_connection import RedisOutage
from trainmedic_server.adapters.redis_outbox import CommandOutbox
from trainmedic_server.errors import StoreUnavailable
from trainmedic_server.telemetry import Metrics


async def test_a_server_that_may_not_act_keeps_its_commands_without_an_error() -> None:
    """Such as one whose SQLite file was moved. It is no error of the loop, which monitoring would report."""
    asked, metrics = asyncio.Event(), Metrics()

    def refuse() -> None:
        asked.set()
        raise StoreUnavailable("it was moved")

    outage = RedisOutage("a test", "redis://h", metrics.bus_errors)
    outbox = CommandOutbox(Redis(), ManualClock(), metrics, outage, refuse)
    outbox.acknowledge([b"1-0"])
    with capture_logs() as logged:
        task = asyncio.create_task(outbox.run())
        await asyncio.wait_for(asked.wait(), 10)
        task.cancel()
        await asyncio.wait([task])
    assert [(entry["log_level"], entry["reason"]) for entry in logged] == [("warning", "it was moved")]
    assert metrics.loop_errors.labels(loop="commands")._value.get() == 0
