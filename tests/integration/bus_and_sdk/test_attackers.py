"""Who writes to Redis without the key, and mistakes: neither reaches the training."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis

from tests.integration.bus_and_sdk.training_loop import ask, eventually, finals, is_empty, put
from tests.support.messages import KEY, make_command
from trainmedic.wire import envelope
from trainmedic_server.adapters.redis_bus import RedisBus


@pytest.mark.parametrize("key", [None, "another key"], ids=["unsigned", "wrong key"])
async def test_unsigned_and_wrongly_signed_commands_are_rejected(
    redis_server: Any, client: Redis, start_job: Any, key: str | None
) -> None:
    """They leave no trace: the same command, correctly signed, is applied afterwards."""
    job = start_job(redis_server.url, signing_key=KEY)
    sent = make_command()
    await put(client, sent, key)
    (reply,) = await finals(client, sent.id)
    assert reply.status == envelope.REJECTED
    assert "sign" in reply.output["reason"]
    assert job.done == []
    await put(client, sent)
    await finals(client, sent.id, count=2)
    assert job.done == [sent.id]


async def test_a_genuine_command_for_another_job_is_rejected(redis_server: Any, client: Redis, start_job: Any) -> None:
    """A signature does not help to copy a command from one stream to another."""
    job = start_job(redis_server.url, signing_key=KEY)
    sent = make_command(target={"kind": "job", "job": "llm-2"})
    await put(client, sent)
    (reply,) = await finals(client, sent.id)
    assert (reply.status, job.done) == (envelope.REJECTED, [])


@pytest.mark.parametrize(
    "params",
    [{}, {"factor": 0}, {"factor": "0.5"}, {"factor": True}, {"factor": 0.5, "rate": 1}, {"factor": 1e999}],
    ids=str,
)
async def test_bad_parameters_never_reach_the_loop(
    redis_server: Any, bus: RedisBus, start_job: Any, params: dict[str, Any]
) -> None:
    """The answer names them."""
    job = start_job(redis_server.url, signing_key=KEY)
    reply = await ask(bus, make_command(params=params))
    assert reply.status == envelope.REJECTED
    assert reply.output["reason"]
    assert job.done == []


@pytest.mark.parametrize(
    "fields",
    [
        {"command": b""},
        {"command": b"{"},
        {"command": b"\xff\xfe\x00"},
        {"command": b"[" * 200_000},
        {"command": b'{"v": 2}'},
        {"command": b"x" * 1_000_000},
        {"other": b"field"},
        {"command": make_command().encode().replace(b'"id":"', b'"id":"\\ud800')},
        {"command": make_command().encode().replace(b'"id":"', b'"id":"' + b"x" * 1000)},
        {
            "command": make_command()
            .encode()
            .replace(b'"expires_at":"2', b'"expires_at":"0001-01-01T00:00:00+23:59", "x":"2')
        },
        {"command": make_command().encode().replace(b'{"factor":0.5}', b"7")},
    ],
    ids=["empty", "cut", "not utf-8", "deep", "version", "large", "other", "surrogate", "long id", "time", "params"],
)
async def test_an_attackers_messages_do_not_stop_the_reader(
    redis_server: Any, bus: RedisBus, client: Redis, start_job: Any, fields: dict[str, bytes]
) -> None:
    """Unreadable messages are removed, and the genuine command after them is carried out."""
    job = start_job(redis_server.url, signing_key=KEY)
    await client.xadd(envelope.job_commands("llm-1"), fields)
    await client.xadd(envelope.REPLIES, {"reply": fields.get("command", b"")})
    assert (await ask(bus, make_command())).status == envelope.APPLIED
    assert len(job.done) == 1
    await eventually(lambda: is_empty(client, envelope.job_commands("llm-1")))


async def test_a_forged_mark_cannot_make_a_command_apply_twice(
    redis_server: Any, bus: RedisBus, client: Redis, start_job: Any
) -> None:
    """A mark that another client has written proves nothing, so nothing is applied or answered."""
    job = start_job(redis_server.url, signing_key=KEY)
    sent = make_command(seconds=1.0)
    await client.set(f"trainmedic:memory:job:llm-1:{sent.id}", b"\xff{")
    assert await bus.request(sent) == ()
    assert job.done == []
