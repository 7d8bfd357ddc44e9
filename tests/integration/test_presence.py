"""The presence of an agent or a job in a real Redis, and who else writes there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import redis

from tests.support.programs import eventually
from trainmedic.wire.command_memory import CommandMemory
from trainmedic.wire.connection import OutageLog, RedisConnection
from trainmedic.wire.writer import PresenceKey, ReplyWriter

KEY = "trainmedic:agent:presence-test"


class Announcing:
    """A writer that announces itself many times a second."""

    def __init__(self, url: str, instance: str) -> None:
        self.rivals: list[Mapping[str, Any]] = []
        self.instance = instance
        self.writer = ReplyWriter(
            RedisConnection(lambda: url, OutageLog("a test")),
            CommandMemory("node:presence-test", instance),
            "trainmedic:commands:node:presence-test",
            PresenceKey(KEY, lambda: {"instance": instance}, self.rivals.append, every=0.05),
        )
        self.writer.start()

    def is_announced(self, client: redis.Redis) -> bool:
        raw: Any = client.get(KEY) if client.type(KEY) == b"string" else None
        return raw is not None and json.dumps({"instance": self.instance})[1:-1].encode() in raw


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as connected:
        connected.delete(KEY)
        yield connected
        connected.delete(KEY)


def test_a_predecessor_is_no_rival_and_a_second_one_is(redis_url: str, client: redis.Redis) -> None:
    """What was there before is of a process that ended; whoever writes later lives."""
    client.set(KEY, json.dumps({"instance": "predecessor"}))
    first = Announcing(redis_url, "first")
    eventually(lambda: first.is_announced(client), 5, "the first presence", every=0.01)
    second = Announcing(redis_url, "second")
    eventually(lambda: first.rivals and second.rivals, 5, "both seeing each other", every=0.01)
    for one in (first, second):
        one.writer.stop(5)
    assert {one["instance"] for one in first.rivals} == {"second"}
    assert {one["instance"] for one in second.rivals} == {"first"}


@pytest.mark.parametrize("junk", ["not JSON", "[1]", "a list"])
def test_what_is_no_presence_is_written_over(redis_url: str, client: redis.Redis, junk: str) -> None:
    """A key that somebody else has used, of whatever type, keeps nobody from announcing itself."""
    if junk == "a list":
        client.rpush(KEY, "x")
    else:
        client.set(KEY, junk)
    one = Announcing(redis_url, "first")
    eventually(lambda: one.is_announced(client), 5, "the presence", every=0.01)
    one.writer.stop(5)
    assert client.get(KEY) is None
