"""The reader of findings on a real Redis: what is taken off the stream, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import redis.asyncio
from structlog.testing import capture_logs

from tests.support.findings import of_kernel, told
from trainmedic.wire.findings import FIELD, FINDINGS
from trainmedic_logs.domain import finding_codec
from trainmedic_logs.domain.finding_codec import FindingUpdate
from trainmedic_server import telemetry
from trainmedic_server.adapters.redis_findings import RedisFindings
from trainmedic_server.errors import StoreUnavailable
from trainmedic_server.ports.ending import end_tasks


class Taker:
    """Takes updates; ``refuses`` says what it does with each first."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.refuses: Any = lambda update: None

    async def take(self, updates: Sequence[FindingUpdate]) -> None:
        for update in updates:
            self.refuses(update)
        self.taken += [update.node for update in updates]


async def read(url: str, taker: Taker, *nodes: str, metrics: telemetry.Metrics | None = None) -> None:
    """Put a finding of each node into the stream, and read until the stream is empty."""
    client = redis.asyncio.Redis.from_url(url)
    for node in nodes:
        raw = finding_codec.encode(told(of_kernel("nfs-away", node, datetime.now(UTC))))
        await client.xadd(FINDINGS, {FIELD: raw})
    reader = RedisFindings(url, taker.take, metrics or telemetry.Metrics())
    task = asyncio.create_task(reader.run())
    async with asyncio.timeout(60):
        while await client.xlen(FINDINGS):
            await asyncio.sleep(0.02)
    await end_tasks([task])
    await reader.close()
    await client.aclose()


async def test_an_update_that_cannot_be_stored_blocks_no_other(redis_url: str) -> None:
    """It is rejected and counted; those that came with it are accepted, each once."""
    taker, metrics = Taker(), telemetry.Metrics()

    def refuse(update: FindingUpdate) -> None:
        if update.node == "node-2":
            raise OverflowError("no database takes that")

    taker.refuses = refuse
    with capture_logs() as logged:
        await read(redis_url, taker, "node-1", "node-2", "node-3", metrics=metrics)
    assert sorted(taker.taken) == ["node-1", "node-3"]
    (refused,) = (each for each in logged if each["event"] == "refusing finding")
    assert isinstance(refused["exc_info"], OverflowError)  # with its place in the code
    assert metrics.registry.get_sample_value("trainmedic_refused_messages_total", {"reason": "unreadable"}) == 1


async def test_while_the_store_is_unavailable_nothing_is_removed(redis_url: str) -> None:
    """Afterwards everything is read again, in order."""
    taker, calls = Taker(), iter(range(100))

    def refuse(update: FindingUpdate) -> None:
        if update.node == "node-2" and next(calls) < 2:
            raise StoreUnavailable("away")

    taker.refuses = refuse
    await read(redis_url, taker, "node-1", "node-2", "node-3")
    assert taker.taken == ["node-1", "node-2", "node-3"]
