"""Kinds of Redis: a cluster, which is refused, and one whose Sentinel is asked by many. ``tests/crash`` has more."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import trainmedic
from tests.support.programs import eventually, free_port
from trainmedic_server.adapters.redis_capacity import check_is_no_cluster
from trainmedic_server.adapters.redis_connection import open_client
from trainmedic_server.errors import ConfigurationError


async def test_a_cluster_is_rejected_and_reported_as_one(
    tmp_path: Path, own_redis: Any, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server does not start with it; a job logs why it gets no commands, and trains on."""
    redis = own_redis(tmp_path, "--cluster-enabled", "yes")
    redis.port = next(port for port in iter(free_port, None) if port < 55_536)  # 10,000 above it is the cluster's own
    redis.start()
    with pytest.raises(ConfigurationError, match="part of a Redis Cluster"):
        await check_is_no_cluster(redis.url)
    await check_is_no_cluster(redis_url)
    caplog.set_level(logging.WARNING, "trainmedic")
    medic = trainmedic.connect(job="llm", redis_url=redis.url)
    try:
        eventually(lambda: "part of a Redis Cluster" in caplog.text, 60, "it is said")
    finally:
        medic.close()


async def test_an_unavailable_redis_prevents_no_server_start(tmp_path: Path, own_redis: Any) -> None:
    """It may become available later."""
    await check_is_no_cluster(own_redis(tmp_path).url)


async def test_connections_opened_at_once_behind_sentinels_all_succeed(redis_url: str) -> None:
    """After a failover none ends the query of another, and a Sentinel is asked once for all that wait."""
    master = {"name": "my", "ip": "127.0.0.1", "port": str(urlsplit(redis_url).port), "flags": "master"}
    words = [word for member in {**master, "num-other-sentinels": "0"}.items() for word in member]
    state = f"*1\r\n*{len(words)}\r\n" + "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
    asked = 0

    async def sentinel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        while head := await reader.readline():
            said = [await reader.readline() for _ in range(2 * int(head[1:]))]
            if said[1].strip() != b"SENTINEL":
                writer.write(b"+OK\r\n")
                continue
            asked += 1
            await asyncio.sleep(0.3)  # in which the others ask
            writer.write(state.encode())
        writer.close()

    async with await asyncio.start_server(sentinel, "127.0.0.1", 0) as server:
        client = open_client(f"redis+sentinel://127.0.0.1:{server.sockets[0].getsockname()[1]}/my/0")

        async def ask(after: float) -> bool:
            await asyncio.sleep(after)
            return bool(await client.ping())

        assert all(await asyncio.gather(*(ask(number / 100) for number in range(10))))
        await client.aclose()
    assert asked < 10
