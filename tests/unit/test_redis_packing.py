"""What the server's connections to Redis do otherwise than redis-py's, and that the result is the same."""

from __future__ import annotations

import importlib.metadata

import pytest
from redis.asyncio.connection import Connection

from trainmedic_server.adapters.redis_connection import open_client

COMMANDS = {
    "text, bytes and numbers": [
        ("XADD", "stream", "MAXLEN", "~", 1000, "*", b"command", b'{"a": 1}'),
        ("EXPIRE", "k", 5),
    ],
    "a name of two words": [("XGROUP CREATE", "stream", "group", "0")],
    "text beyond ASCII, and nothing": [("SET", "schlüssel", "", b"")],
    "a fraction": [("SET", "key", 1.5)],
    "what is large": [("SET", "key", b"x" * 100_000), ("GET", "key")],
    "no command": [],
}


@pytest.mark.parametrize("commands", COMMANDS.values(), ids=COMMANDS.keys())
async def test_pipelines_are_packed_as_redis_py_packs_them(commands: list[tuple[str | bytes | float, ...]]) -> None:
    client = open_client("redis://127.0.0.1:1/0")
    connection = client.connection_pool.make_connection()
    assert b"".join(connection.pack_commands(commands)) == b"".join(Connection().pack_commands(commands))
    await client.aclose()


@pytest.mark.parametrize("url", ["redis://h:1/0", "rediss://h:1/0", "unix:///tmp/socket", "redis+sentinel://h:1/m"])
async def test_every_kind_of_connection_is_packed_so(url: str) -> None:
    client = open_client(url)
    connection = client.connection_pool.make_connection()
    assert type(connection).pack_commands is not Connection.pack_commands
    await client.aclose()


@pytest.mark.parametrize("url", ["redis://h:1/0", "rediss://h:1/0", "unix:///tmp/socket", "redis+sentinel://h:1/m"])
async def test_further_connections_read_no_package_metadata(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storm of commands opens many connections at once. Each states the same version as redis-py's own."""
    client = open_client(url)
    read: list[str] = []
    monkeypatch.setattr(importlib.metadata, "version", lambda name: read.append(name) or "0")
    connection = client.connection_pool.make_connection()
    monkeypatch.undo()
    assert read == []
    assert connection.driver_info.lib_version == Connection().driver_info.lib_version
    await client.aclose()
