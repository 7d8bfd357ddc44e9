"""The presence of an agent or a job in a real Redis, and who else writes there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import pytest
import redis

from tests.support.programs import eventually
from trainmedic.wire import envelope
from trainmedic.wire.command_memory import CommandMemory
from trainmedic.wire.connection import OutageLog, RedisConnection
from trainmedic.wire.signing import Signer
from trainmedic.wire.writer import PresenceKey, ReplyWriter

KEY = "trainmedic:agent:presence-test"


class Announcing:
    """A writer that announces itself many times a second."""

    def __init__(self, url: str, instance: str, signer: Signer | None = None) -> None:
        described = {"node": "presence-test", "instance": instance}
        self.rivals: list[Mapping[str, Any]] = []
        self.instance = instance
        self.writer = ReplyWriter(
            RedisConnection(lambda: url, OutageLog("a test")),
            CommandMemory("node:presence-test", instance),
            "trainmedic:commands:node:presence-test",
            PresenceKey(KEY, "presence-test", lambda: described, self.rivals.append, every=0.05),
            signer,
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


def test_a_predecessor_is_not_a_rival_but_a_second_agent_is(redis_url: str, client: redis.Redis) -> None:
    """An earlier presence is from an ended process; a later writer is alive."""
    client.set(KEY, json.dumps({"instance": "predecessor"}))
    first = Announcing(redis_url, "first")
    eventually(lambda: first.is_announced(client), 60, "the first presence", every=0.01)
    second = Announcing(redis_url, "second")
    eventually(lambda: first.rivals and second.rivals, 60, "both seeing each other", every=0.01)
    for one in (first, second):
        one.writer.stop(5)
    assert {one["instance"] for one in first.rivals} == {"second"}
    assert {one["instance"] for one in second.rivals} == {"first"}


@pytest.mark.parametrize("junk", ["not JSON", "[1]", "a list"])
def test_a_key_that_is_not_a_presence_is_overwritten(redis_url: str, client: redis.Redis, junk: str) -> None:
    """Another program's key of any type prevents no announcement."""
    if junk == "a list":
        client.rpush(KEY, "x")
    else:
        client.set(KEY, junk)
    one = Announcing(redis_url, "first")
    eventually(lambda: one.is_announced(client), 60, "the presence", every=0.01)
    one.writer.stop(5)
    assert client.get(KEY) is None


def forged(value: str, signer: Signer | None = None, key: str = KEY, **members: Any) -> bytes:
    """A presence that names another process."""
    at = envelope.write_time(envelope.utc_now() + timedelta(seconds=1))
    raw = json.dumps({"node": "presence-test", "instance": value, "at": at, **members}).encode()
    return raw if signer is None else signer.seal(raw, key)


def test_with_a_key_only_its_holders_can_be_rivals(redis_url: str, client: redis.Redis) -> None:
    """Unsigned, signed with another key, signed for another node, or old: none of these makes an agent refuse
    commands; a presence that is genuine, of this node and new does."""
    signer = Signer.of(b"the shared key of this test")
    first = Announcing(redis_url, "first", signer)
    eventually(lambda: first.is_announced(client), 60, "the first presence", every=0.01)
    old = envelope.write_time(envelope.utc_now() - timedelta(seconds=30))
    for number, value in enumerate(
        [
            forged("unsigned"),
            forged("another key", Signer.of(b"a key that somebody made up")),
            forged("another node", signer, envelope.agent_presence("gpu-2"), node="gpu-2"),
            forged("an earlier process", signer, at=old),
        ]
    ):
        client.set(KEY, value)
        eventually(lambda: first.is_announced(client), 60, f"the presence again after forgery {number}", every=0.01)
    assert first.rivals == []
    client.set(KEY, forged("genuine", signer))
    eventually(lambda: first.rivals, 60, "a genuine rival", every=0.01)
    first.writer.stop(5)
    assert {rival["instance"] for rival in first.rivals} == {"genuine"}
