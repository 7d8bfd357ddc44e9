"""What comes too late is not applied, and an undo takes back what was applied and nothing else."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from redis.asyncio import Redis

import trainmedic
from tests.integration.bus_and_sdk.training_loop import again, ask, eventually, finals, is_empty, put, until
from tests.support.messages import KEY, make_command
from trainmedic.wire import envelope
from trainmedic_server.adapters.redis_bus import RedisBus


async def test_a_late_command_is_answered_expired_and_may_come_again(
    redis_server: Any, client: Redis, start_job: Any
) -> None:
    """A command that was never applied is not remembered as if it had been."""
    job = start_job(redis_server.url, signing_key=KEY)
    late = make_command(seconds=-1)
    await put(client, late)
    assert [reply.status for reply in await finals(client, late.id)] == [envelope.EXPIRED]
    await put(client, again(late))
    assert [reply.status for reply in await finals(client, late.id, count=2)][1] == envelope.APPLIED
    assert job.done == [late.id]


async def test_a_command_that_waits_too_long_for_the_loop_expires_and_may_come_again(
    redis_server: Any, client: Redis, start_job: Any
) -> None:
    """It was accepted, but the step took longer than the command was valid."""
    job = start_job(redis_server.url, signing_key=KEY)
    job.hold()
    sent = make_command(seconds=3)  # enough for a slow machine to take it
    await put(client, sent)
    await eventually(lambda: sent.id in job.medic._queue.waiting)
    await until(sent.expires_at)
    job.go_on()
    assert [reply.status for reply in await finals(client, sent.id)] == [envelope.EXPIRED]
    await put(client, again(sent))
    assert [reply.status for reply in await finals(client, sent.id, count=2)][1] == envelope.APPLIED
    assert job.done == [sent.id]


async def test_a_command_dropped_by_the_loop_is_answered_failed(
    redis_server: Any, client: Redis, start_job: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """This happens at its expiry; a later answer is logged and changes nothing."""
    fallen: list[trainmedic.JobCommand] = []
    start_job(redis_server.url, fallen.append, signing_key=KEY)
    sent = make_command(seconds=3)  # enough for a slow machine to take it
    await put(client, sent)
    (reply,) = await finals(client, sent.id)
    assert (reply.status, reply.output["reason"]) == (
        envelope.FAILED,
        "the training loop took the command and did not answer it",
    )
    with caplog.at_level(logging.ERROR, "trainmedic"):
        fallen[0].applied()
    assert "comes too late" in caplog.text


async def test_a_job_that_ends_answers_its_pending_commands(redis_server: Any, client: Redis, start_job: Any) -> None:
    """This covers the commands in the loop and those still waiting for it."""
    job = start_job(redis_server.url, lambda _: None, signing_key=KEY)
    taken, waiting = make_command(), make_command()
    await put(client, taken)
    await eventually(lambda: job.done == [taken.id])
    job.hold()
    await put(client, waiting)
    await eventually(lambda: len(job.medic._queue.arrived) == 1)
    job.end()
    for sent in (taken, waiting):
        (reply,) = await finals(client, sent.id)
        assert reply.status == envelope.FAILED
        assert "the job ended before it" in reply.output["reason"]


async def test_an_undo_of_an_applied_command_is_applied(redis_server: Any, bus: RedisBus, start_job: Any) -> None:
    """It is handled like any command, also by the next process."""
    job = start_job(redis_server.url, signing_key=KEY)
    done = make_command()
    await ask(bus, done)
    job.end()
    second = start_job(redis_server.url, signing_key=KEY)
    undo = make_command(params={"factor": 2.0}, undo_of=done.id)
    assert "nothing_to_undo" not in (await ask(bus, undo)).output
    assert second.done == [undo.id]


async def test_an_undo_of_an_unapplied_command_changes_nothing(
    redis_server: Any, bus: RedisBus, client: Redis, start_job: Any
) -> None:
    """Never seen, rejected or expired: success, with nothing done. A command after its undo is not applied."""

    def act(given: trainmedic.JobCommand) -> None:
        given.rejected("no")

    job = start_job(redis_server.url, act, signing_key=KEY)
    refused, unseen, expired = make_command(), make_command(), make_command(seconds=-1)
    await ask(bus, refused)
    await put(client, expired)
    await eventually(lambda: is_empty(client, envelope.job_commands("llm-1")))
    for original in (refused, unseen, expired):
        reply = await ask(bus, make_command(undo_of=original.id))
        assert (reply.status, reply.output) == (envelope.APPLIED, {"nothing_to_undo": True, "known": "never_applied"})
    assert (await ask(bus, unseen)).status == envelope.REJECTED
    assert job.done == [refused.id]


async def test_an_undo_waits_for_the_answer_to_its_command(redis_server: Any, bus: RedisBus, start_job: Any) -> None:
    """Both came in one step: whether there is something to undo is known only after the answer."""
    job = start_job(redis_server.url, lambda given: given.failed("out of memory"), signing_key=KEY)
    job.hold()
    first = make_command()
    undo = make_command(undo_of=first.id)
    asked = [asyncio.create_task(ask(bus, first)), asyncio.create_task(ask(bus, undo))]
    await eventually(lambda: len(job.medic._queue.arrived) == 2)
    job.go_on()
    replies = await asyncio.gather(*asked)
    assert [reply.status for reply in replies] == [envelope.FAILED, envelope.APPLIED]
    assert replies[1].output["nothing_to_undo"] is True
    assert job.done == [first.id]
