"""How commands reach a training loop over a real Redis, how it answers, and who is said to be there."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from datetime import UTC, datetime
from typing import Any

from redis.asyncio import Redis

import trainmedic
from tests.integration.bus_and_sdk.training_loop import ask, eventually, is_empty
from tests.support.messages import KEY, make_command
from trainmedic.wire import envelope
from trainmedic_server.adapters.redis_bus import RedisBus
from trainmedic_server.adapters.redis_outbox import QueuedCommand
from trainmedic_server.adapters.redis_replies import ReplyWaiter


async def test_a_command_reaches_the_loop_and_its_answer_the_server(
    redis_server: Any, bus: RedisBus, start_job: Any
) -> None:
    """Action, checked parameters and reason arrive in the job; status, output, rank and step at the server."""
    seen: list[trainmedic.JobCommand] = []

    def act(given: trainmedic.JobCommand) -> None:
        seen.append(given)
        given.applied({"before": 0.1}, after=0.05)

    start_job(redis_server.url, act, signing_key=KEY)
    reply = await ask(bus, make_command())
    assert (reply.status, reply.rank) == (envelope.APPLIED, 0)
    assert reply.output["before"] == 0.1
    assert reply.output["after"] == 0.05
    assert reply.output["step"] >= 1
    assert reply.sender.startswith("llm-1/0@")
    assert (seen[0].action, seen[0].params, seen[0].reason) == (
        "job.scale_lr",
        {"factor": 0.5},
        "TrainingLossSpike",
    )
    assert seen[0].parameters == trainmedic.ScaleLr(0.5)


async def test_an_answer_waits_for_no_other_command(redis_server: Any, bus: RedisBus, start_job: Any) -> None:
    """Commands come by the connection that answers go by: while one is in hand nobody waits for the next at Redis,
    which would hold the answer up by a tenth of a second at least, and a second where nothing else is to do."""
    start_job(redis_server.url, signing_key=KEY)
    for pause, times in ((0.0, 10), (1.2, 3)):
        seconds = []
        for _ in range(times):
            await asyncio.sleep(pause)
            began = time.monotonic()
            await ask(bus, make_command())
            seconds.append(time.monotonic() - began)
        assert min(seconds) < 0.1, seconds  # each would be held up; a busy machine does not hold up all


async def test_only_the_memory_is_left_in_redis(
    redis_server: Any, bus: RedisBus, client: Redis, start_job: Any
) -> None:
    """An answered and settled command is on no stream and pending nowhere."""
    job = start_job(redis_server.url, signing_key=KEY)
    sent = make_command()
    await ask(bus, sent)
    stream = envelope.job_commands("llm-1")
    await eventually(lambda: is_empty(client, stream))
    await eventually(lambda: is_empty(client, envelope.REPLIES))
    job.end()
    keys = {key.decode() for key in await client.keys("*")}
    memory = f"trainmedic:memory:job:llm-1:{sent.id}"
    assert keys == {stream, envelope.REPLIES, memory, "trainmedic:memory-since:job:llm-1"}
    assert await client.ttl(stream) > 0
    assert await client.ttl("trainmedic:memory-since:job:llm-1") > 0
    assert await client.ttl(f"trainmedic:memory:job:llm-1:{sent.id}") > 0


async def test_a_command_leaves_no_garbage_to_collect(redis_server: Any, bus: RedisBus, start_job: Any) -> None:
    """A server that rarely collects garbage must not fill its memory with remains of its commands."""
    start_job(redis_server.url, signing_key=KEY)
    gc.collect()
    gc.disable()
    try:
        await ask(bus, make_command())
        # By type, since isinstance() asks each object, and some of PyTorch's warn of being asked.
        left = [kept for kept in gc.get_objects() if issubclass(type(kept), (ReplyWaiter, QueuedCommand))]
    finally:
        gc.enable()
    assert left == []


async def test_handlers_answer_for_the_loop(redis_server: Any, bus: RedisBus, start_job: Any) -> None:
    """Returning means applied, raising gives a reason, and no handler means unsupported; the loop survives."""
    job = start_job(redis_server.url, act=lambda _: None, signing_key=KEY)

    @job.medic.on("job.scale_lr")
    def scale(given: trainmedic.JobCommand) -> dict[str, Any]:
        return {"factor": given.params["factor"]}

    @job.medic.on("job.rollback", how="restart")
    def roll_back(given: trainmedic.JobCommand) -> None:
        raise trainmedic.Rejected("there is no checkpoint")

    @job.medic.on("job.pause")
    def pause(given: trainmedic.JobCommand) -> None:
        raise trainmedic.Unsupported("not in this framework")

    @job.medic.on("job.checkpoint")
    def save(given: trainmedic.JobCommand) -> None:
        raise OSError("no space left")

    async def said(action: str, **params: Any) -> tuple[str, Any]:
        reply = await ask(bus, make_command(action=action, params=params))
        return reply.status, reply.output.get("reason", reply.output.get("factor"))

    assert await said("job.scale_lr", factor=0.5) == ("applied", 0.5)
    assert await said("job.rollback", steps_back=1) == ("rejected", "there is no checkpoint")
    assert await said("job.pause", max="1m") == ("unsupported", "not in this framework")
    assert await said("job.checkpoint") == ("failed", "OSError: no space left")
    assert await said("job.stop") == ("unsupported", "the training loop does not carry out job.stop")
    assert await said("job.scale_lr", factor=0.5) == ("applied", 0.5)
    (present,) = await bus.jobs()
    assert present.details["capabilities"] == {
        "job.scale_lr": "live",
        "job.rollback": "restart",
        "job.pause": "live",
        "job.checkpoint": "live",
    }


async def test_a_handler_may_answer_when_its_work_is_done(redis_server: Any, bus: RedisBus, start_job: Any) -> None:
    """Work that outlasts the handler, such as a loop restart, counts as applied when the answer comes."""
    job = start_job(redis_server.url, act=lambda _: None, signing_key=KEY)
    begun: list[trainmedic.JobCommand] = []

    @job.medic.on("job.rollback", how="restart")
    def roll_back(given: trainmedic.JobCommand) -> None:
        given.later()
        begun.append(given)

    asked = asyncio.create_task(ask(bus, make_command(action="job.rollback", params={})))
    await eventually(lambda: begun)
    await asyncio.sleep(0.05)  # many steps
    assert not asked.done()
    begun[0].applied(checkpoint="step-7")
    assert ((await asked).status, (await asked).output["checkpoint"]) == ("applied", "step-7")


async def test_a_job_announces_what_it_cannot_do(redis_server: Any, bus: RedisBus, start_job: Any) -> None:
    """The capability is announced; a command is answered with the reason without reaching the loop."""
    job = start_job(redis_server.url, act=lambda _: None, signing_key=KEY)
    job.medic.cannot("job.rollback", "the loop is not restarted here")
    job.hold()
    reply = await ask(bus, make_command(action="job.rollback", params={}))
    assert (reply.status, reply.output["reason"]) == ("unsupported", "the loop is not restarted here")

    async def announced() -> bool:
        return [each.details["capabilities"] for each in await bus.jobs()] == [{"job.rollback": "unsupported"}]

    await eventually(announced)


async def test_presence_describes_the_job_and_ends_with_it(
    redis_server: Any, bus: RedisBus, client: Redis, start_job: Any
) -> None:
    """It has an expiry while the job lives, and is deleted when the job ends."""
    job = start_job(redis_server.url, rank=0, world_size=8, capabilities={"job.stop": "unsupported"}, signing_key=KEY)
    await eventually(lambda: client.exists(envelope.job_presence("llm-1")))
    assert 0 < await client.ttl(envelope.job_presence("llm-1")) <= 15

    async def is_alone() -> bool:
        return bool((await bus.jobs())[0].details["ranks"] == [0])

    await eventually(is_alone)
    (present,) = await bus.jobs()
    assert present.name == "llm-1"
    assert (present.details["world_size"], present.details["pid"]) == (8, os.getpid())
    assert abs((datetime.now(UTC) - present.last_seen).total_seconds()) < 60
    reply = await ask(bus, make_command(action="job.stop", params={}))
    assert (reply.status, job.done) == (envelope.UNSUPPORTED, [])
    job.end()
    assert await bus.jobs() == []


async def test_the_presence_of_a_newer_process_is_not_deleted(redis_server: Any, client: Redis, start_job: Any) -> None:
    """A job that restarts before its old process has ended stays connected."""
    old = start_job(redis_server.url)
    await eventually(lambda: client.exists(envelope.job_presence("llm-1")))
    await client.set(envelope.job_presence("llm-1"), json.dumps({"instance": "newer"}))
    old.end()
    assert await client.exists(envelope.job_presence("llm-1"))


async def test_a_burst_of_a_thousand_commands_is_applied_once_each(
    redis_server: Any, bus: RedisBus, start_job: Any
) -> None:
    """They are applied in the order of sending, and all are answered."""
    job = start_job(redis_server.url, signing_key=KEY)
    sent = [make_command(seconds=30) for _ in range(1000)]
    replies = await asyncio.gather(*(ask(bus, one) for one in sent))
    assert {reply.status for reply in replies} == {envelope.APPLIED}
    assert job.done == [one.id for one in sent]


async def test_a_jobs_own_command_is_validated_by_its_schema(redis_server: Any, bus: RedisBus, start_job: Any) -> None:
    """It is announced with the presence. Invalid ones never reach the handler; a wrong name gets a suggestion."""
    job = start_job(redis_server.url, lambda command: None, signing_key=KEY)
    seen: list[Any] = []
    schema = {"type": "object", "properties": {"shard": {"type": "integer"}}, "required": ["shard"]}

    @job.medic.on("acme.skip_shard", schema=schema)
    def skip(command: trainmedic.JobCommand) -> dict[str, Any]:
        seen.append(command.params["shard"])
        return {"skipped": command.params["shard"]}

    reply = await ask(bus, make_command("acme.skip_shard", params={"shard": 7}))
    assert (reply.status, reply.output["skipped"], seen) == (envelope.APPLIED, 7, [7])
    wrong = await ask(bus, make_command("acme.skip_shard", params={"shrad": 7}))
    assert wrong.status == envelope.REJECTED
    assert wrong.output["reason"].startswith("acme.skip_shard: shard is missing; there is no parameter 'shrad'; did")
    other = await ask(bus, make_command("acme.skip_shad"))
    assert (other.status, "did you mean acme.skip_shard?" in other.output["reason"]) == (envelope.UNSUPPORTED, True)
    assert seen == [7]

    async def announced() -> bool:
        present = [presence for presence in await bus.jobs() if presence.name == "llm-1"]
        return bool(present) and present[0].details.get("schemas") == {"acme.skip_shard": schema}

    await eventually(announced)
