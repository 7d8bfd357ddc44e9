"""Two servers with a store of their own on one Redis: each takes the other's replies. Both say so."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from tests.conftest import RedisServer
from trainmedic_server.adapters.redis_capacity import RedisCapacity
from trainmedic_server.telemetry import Metrics


@pytest.fixture
def servers(shared_redis: RedisServer) -> tuple[RedisCapacity, RedisCapacity]:
    return RedisCapacity(shared_redis.url, Metrics()), RedisCapacity(shared_redis.url, Metrics(), "it is old")


async def test_two_servers_on_one_redis_see_each_other(servers: tuple[RedisCapacity, RedisCapacity]) -> None:
    """From the second sight on, once in the log, until the other is gone."""
    first, second = servers
    with capture_logs() as lines:
        for _ in range(4):
            for server in servers:
                await server.look_for_other_servers()
    assert "another server uses it" in first.caveat()
    assert second.caveat().startswith("it is old; another server uses it")
    assert [line["event"] for line in lines] == ["another server uses this Redis"] * 2
    await first.look_for_other_servers()
    await first.look_for_other_servers()
    assert first.caveat() == ""
    for server in servers:
        await server._client.aclose()


async def test_a_server_that_takes_over_is_alone(servers: tuple[RedisCapacity, RedisCapacity]) -> None:
    """The leader before it wrote its name, and perhaps once more after it."""
    old, new = servers
    for server in (old, new, old, new, new):
        await server.look_for_other_servers()
        assert "another" not in server.caveat()
    for server in servers:
        await server._client.aclose()
