"""What is said of a Redis that is nearly full, by what it says of itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis
from structlog.testing import capture_logs

from trainmedic_server.adapters import redis_capacity
from trainmedic_server.adapters.redis_capacity import RedisCapacity, judged
from trainmedic_server.adapters.redis_connection import RedisOutage
from trainmedic_server.telemetry import Metrics

ROOMY = {"connected_clients": 100, "maxclients": 10_000, "used_memory": 10_000_000, "maxmemory": 128_000_000}


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({}, {}),
        ({"maxmemory": 0, "maxmemory_policy": "allkeys-lru"}, {}),  # it never drops anything
        ({"connected_clients": 8_999}, {}),
        ({"connected_clients": 9_000}, {"clients": "9000 clients of at most 10000"}),
        ({"connected_clients": 14_960, "maxclients": 15_000}, {"clients": "of at most 15000"}),
        ({"used_memory": 120_000_000}, {"memory": "120 MB of a maxmemory of 128 MB"}),
        ({"maxmemory_policy": "volatile-ttl"}, {"policy": "volatile-ttl"}),
    ],
)
def test_what_is_nearly_full_is_said(info: dict[str, Any], said: dict[str, str]) -> None:
    """With figures, and what to do; of a Redis with room, nothing."""
    _, warnings = judged({**ROOMY, "maxmemory_policy": "noeviction", **info})
    assert warnings.keys() == said.keys()
    assert all(text in warnings[of] for of, text in said.items())


def test_an_outage_says_that_redis_is_full_once() -> None:
    """Also where it began otherwise; what is said besides is of the last failure."""
    outage = RedisOutage("a test", "redis://h", Metrics().bus_errors)
    full = redis.ConnectionError("max number of clients reached")
    with capture_logs() as lines:
        for error in (redis.ConnectionError("reset"), full, full, OSError("refused"), full):
            outage.begin(error)
            assert (outage.reason is not None) == (error is full)
        outage.end()
        assert outage.reason is None
        outage.begin(full)
    told = [line["error"].partition(":")[0] for line in lines if "error" in line]
    assert told == ["ConnectionError", "it takes no more clients", "it takes no more clients"]


def test_shares_are_of_what_there_may_be() -> None:
    """Where no limit of memory is set, or the one of clients is not known, there is none."""
    assert judged(ROOMY)[0] == {"clients": 0.01, "memory": 10 / 128}
    assert judged({"connected_clients": 3, "used_memory": 1, "maxmemory": 0})[0] == {}


async def test_an_unexpected_answer_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a figure that is no number, of a service that is nearly Redis."""
    monkeypatch.setattr(redis_capacity, "LOOK_SECONDS", 0.0)
    answers = iter([{**ROOMY, "maxmemory": "n/a"}, {**ROOMY, "connected_clients": 9_999}])
    is_read = asyncio.Event()

    async def info(part: str) -> dict[str, Any]:
        if part == "memory":
            return {}
        answer = next(answers, None)
        if answer is None:
            is_read.set()
            await asyncio.sleep(60)
        return answer or {}

    metrics = Metrics()
    capacity = RedisCapacity("redis://127.0.0.1:1", metrics)
    monkeypatch.setattr(capacity._client, "info", info)
    watch = asyncio.create_task(capacity.watch())
    await asyncio.wait([watch, asyncio.create_task(is_read.wait())], timeout=10, return_when=asyncio.FIRST_COMPLETED)
    assert "9999 clients" in capacity.caveat()
    assert metrics.loop_errors.labels(loop="capacity")._value.get() == 1
    watch.cancel()
    await asyncio.wait([watch])
