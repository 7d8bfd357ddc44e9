"""The server's bus and a job with the SDK, over a real Redis."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

import trainmedic
from tests.support.messages import KEY, make_command
from trainmedic.wire import envelope
from trainmedic.wire.envelope import Command, Reply
from trainmedic_server import telemetry
from trainmedic_server.adapters.redis_bus import RedisBus
from trainmedic_server.adapters.system_clock import SystemClock

ROOT = Path(__file__).parents[2]


class TrainingLoop:
    """A training loop in a thread: it steps every few milliseconds and carries out what `act` says."""

    def __init__(self, url: str, act: Callable[[trainmedic.JobCommand], None] | None = None, **options: Any) -> None:
        self.medic = trainmedic.connect(job="llm-1", redis_url=url, **options)
        self.done: list[str] = []
        self._act = act or (lambda command: command.applied())
        self._over = threading.Event()
        self._held = threading.Event()
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def hold(self) -> None:
        """A step that takes long: nothing is picked up until `go_on`."""
        self._held.set()

    def go_on(self) -> None:
        self._held.clear()

    def _train(self) -> None:
        step = 0
        while not self._over.wait(0.002):
            if self._held.is_set():
                continue
            step += 1
            self.medic.report(step=step, loss=1.0)
            for command in self.medic.commands(step):
                self.done.append(command.id)
                self._act(command)

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        self.medic.close()


@pytest.fixture
def start_job() -> Iterator[Callable[..., TrainingLoop]]:
    jobs: list[TrainingLoop] = []

    def start(url: str, act: Callable[[trainmedic.JobCommand], None] | None = None, **options: Any) -> TrainingLoop:
        jobs.append(TrainingLoop(url, act, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


@pytest.fixture
async def client(redis_server: Any) -> AsyncIterator[Redis]:
    made: Redis = Redis.from_url(redis_server.url, protocol=2)
    yield made
    await made.aclose()


def again(sent: Command, seconds: float = 5.0) -> Command:
    """The same command, asked for once more with more time."""
    fields = {name: getattr(sent, name) for name in sent.__dataclass_fields__}
    return Command(**{**fields, "expires_at": datetime.now(UTC) + timedelta(seconds=seconds)})


async def ask(bus: RedisBus, sent: Command) -> Reply:
    """The one final reply."""
    (reply,) = await bus.request(sent)
    bus.acknowledge(sent.id)
    return reply


async def put(client: Redis, sent: Command, key: str | None = KEY) -> None:
    """Put a command on the stream by hand, as a server or an attacker would."""
    fields: dict[str, Any] = {"command": sent.encode()}
    if key is not None:
        fields["signature"] = envelope.sign(sent.encode(), key.encode())
    await client.xadd(envelope.job_commands("llm-1"), fields)


async def finals(client: Redis, command_id: str, count: int = 1, seconds: float = 5.0) -> list[Reply]:
    """The final replies to a command that are on the stream, once there are that many."""
    async with asyncio.timeout(seconds):
        while True:
            entries = await client.xrange(envelope.REPLIES)
            replies = [Reply.decode(fields[b"reply"]) for _, fields in entries if b"reply" in fields]
            found = [reply for reply in replies if reply.command_id == command_id and reply.is_final]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.005)


async def eventually(holds: Callable[[], Any], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while True:
            value = holds()
            if await value if asyncio.iscoroutine(value) else value:
                return
            await asyncio.sleep(0.005)


# --- delivery ---------------------------------------------------------------------------------------


async def test_a_command_reaches_the_loop_and_its_answer_the_server(
    redis_server: Any, bus: RedisBus, start_job: Any
) -> None:
    """Action, checked parameters and reason there; status, output, rank and step here."""
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
    seconds = []
    for pause in (0.0,) * 10 + (1.2,) * 3:
        await asyncio.sleep(pause)
        began = time.monotonic()
        await ask(bus, make_command())
        seconds.append(time.monotonic() - began)
    assert sorted(seconds)[len(seconds) // 2] < 0.1, seconds


async def test_nothing_is_left_in_redis_but_the_memory(
    redis_server: Any, bus: RedisBus, client: Redis, start_job: Any
) -> None:
    """Answered and settled, a command is on no stream and pending nowhere."""
    job = start_job(redis_server.url, signing_key=KEY)
    sent = make_command()
    await ask(bus, sent)
    stream = envelope.job_commands("llm-1")
    await eventually(lambda: _empty(client, stream))
    await eventually(lambda: _empty(client, envelope.REPLIES))
    job.end()
    keys = {key.decode() for key in await client.keys("*")}
    memory = f"trainmedic:memory:job:llm-1:{sent.id}"
    assert keys == {stream, envelope.REPLIES, memory, "trainmedic:memory-since:job:llm-1"}
    assert await client.ttl(stream) > 0
    assert await client.ttl("trainmedic:memory-since:job:llm-1") > 0
    assert await client.ttl(f"trainmedic:memory:job:llm-1:{sent.id}") > 0


async def test_handlers_answer_for_the_loop(redis_server: Any, bus: RedisBus, start_job: Any) -> None:
    """Returning is applied, raising says why not, and no handler is unsupported; the loop lives on."""
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
    """Work that outlasts the handler, such as a restart of the loop, is applied when the answer says so."""
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


async def test_what_a_job_cannot_do_it_says_beforehand(redis_server: Any, bus: RedisBus, start_job: Any) -> None:
    """The capability is announced, and a command is answered with the reason without troubling the loop."""
    job = start_job(redis_server.url, act=lambda _: None, signing_key=KEY)
    job.medic.cannot("job.rollback", "the loop is not restarted here")
    job.hold()
    reply = await ask(bus, make_command(action="job.rollback", params={}))
    assert (reply.status, reply.output["reason"]) == ("unsupported", "the loop is not restarted here")

    async def announced() -> bool:
        return [each.details["capabilities"] for each in await bus.jobs()] == [{"job.rollback": "unsupported"}]

    await eventually(announced)


async def test_presence_says_who_is_there_and_goes_with_the_job(
    redis_server: Any, bus: RedisBus, client: Redis, start_job: Any
) -> None:
    """Expiring while the job lives, deleted when it ends."""
    job = start_job(redis_server.url, rank=0, world_size=8, capabilities={"job.stop": "unsupported"}, signing_key=KEY)
    await eventually(lambda: client.exists(envelope.job_presence("llm-1")))
    assert 0 < await client.ttl(envelope.job_presence("llm-1")) <= 15

    async def is_alone() -> bool:
        return bool((await bus.jobs())[0].details["ranks"] == [0])

    await eventually(is_alone)
    (present,) = await bus.jobs()
    assert present.name == "llm-1"
    assert (present.details["world_size"], present.details["pid"]) == (8, os.getpid())
    assert abs((datetime.now(UTC) - present.last_seen).total_seconds()) < 10
    reply = await ask(bus, make_command(action="job.stop", params={}))
    assert (reply.status, job.done) == (envelope.UNSUPPORTED, [])
    job.end()
    assert await bus.jobs() == []


async def test_the_presence_of_a_newer_process_is_left_alone(redis_server: Any, client: Redis, start_job: Any) -> None:
    """A job that is restarted before its old process has ended stays connected."""
    old = start_job(redis_server.url)
    await eventually(lambda: client.exists(envelope.job_presence("llm-1")))
    await client.set(envelope.job_presence("llm-1"), json.dumps({"instance": "newer"}))
    old.end()
    assert await client.exists(envelope.job_presence("llm-1"))


async def test_a_burst_of_a_thousand_commands_is_applied_once_each(
    redis_server: Any, bus: RedisBus, start_job: Any
) -> None:
    """In order of sending, all answered."""
    job = start_job(redis_server.url, signing_key=KEY)
    sent = [make_command(seconds=30) for _ in range(1000)]
    replies = await asyncio.gather(*(ask(bus, one) for one in sent))
    assert {reply.status for reply in replies} == {envelope.APPLIED}
    assert job.done == [one.id for one in sent]


# --- at least once, at most once ----------------------------------------------------------------------


async def test_a_repeated_command_is_answered_again_and_not_applied_again(
    redis_server: Any, client: Redis, start_job: Any
) -> None:
    """From the memory of the process; also past its expiry, because it was applied in time."""
    job = start_job(redis_server.url, signing_key=KEY)
    sent = make_command(seconds=2)  # enough for a slow machine to take it
    await put(client, sent)
    first = await finals(client, sent.id)
    await asyncio.sleep(max(0.0, (sent.expires_at - datetime.now(UTC)).total_seconds()))
    await put(client, sent)
    both = await finals(client, sent.id, count=2)
    assert both[1].status == envelope.APPLIED
    assert both[1].output == first[0].output
    assert job.done == [sent.id]


async def test_a_restarted_job_remembers_what_was_applied(redis_server: Any, client: Redis, start_job: Any) -> None:
    """The memory is in Redis too: the new process answers and does not apply."""
    sent = make_command()
    first = start_job(redis_server.url, lambda given: given.applied(after=0.05), signing_key=KEY)
    await put(client, sent)
    await finals(client, sent.id)
    first.end()
    second = start_job(redis_server.url, signing_key=KEY)
    await put(client, sent)
    replies = await finals(client, sent.id, count=2)
    assert (replies[1].status, replies[1].output["after"]) == (envelope.APPLIED, 0.05)
    assert second.done == []


async def test_asking_again_while_it_is_carried_out_gives_it_more_time(
    redis_server: Any, bus: RedisBus, start_job: Any
) -> None:
    """The server timed out, and asks with the same id: one effect, one answer, no expiry in between."""
    job = start_job(redis_server.url, signing_key=KEY)
    job.hold()
    sent = make_command(seconds=0.3)
    asked = [asyncio.create_task(bus.request(sent)), asyncio.create_task(bus.request(again(sent)))]
    await asyncio.sleep(0.6)
    job.go_on()
    assert [reply.status for reply in await asked[1]] == [envelope.APPLIED]
    await asked[0]
    assert job.done == [sent.id]


@pytest.mark.parametrize("moment", ["before", "while", "after"])
async def test_a_killed_job_applies_nothing_twice(
    redis_server: Any, bus: RedisBus, tmp_path: Path, moment: str
) -> None:
    """Killed before it answers: the next process says so, and does not apply it. Killed after: it says what was."""
    log = tmp_path / "effects"
    sent = make_command(seconds=20)
    with _process(redis_server.url, log, moment) as first:
        asked = asyncio.create_task(bus.request(sent))
        if moment == "after":
            assert [reply.status for reply in await asked] == [envelope.APPLIED]
        else:
            await eventually(lambda: log.exists() and moment in log.read_text())
        first.send_signal(signal.SIGKILL)
        first.wait()
    with _process(redis_server.url, log, "answer"):
        if moment == "after":
            assert (await ask(bus, again(sent))).status == envelope.APPLIED
        else:
            (reply,) = await asked
            assert reply.status == envelope.FAILED
            assert "interrupted" in reply.output["reason"]
        fresh = make_command()
        assert (await ask(bus, fresh)).status == envelope.APPLIED
    assert log.read_text().split().count(f"applied:{sent.id}") == (0 if moment == "before" else 1)


_PROGRAM = """
import sys, time, trainmedic
url, path, moment = sys.argv[1:]
log = open(path, "a", buffering=1)
medic = trainmedic.connect(job="llm-1", redis_url=url, signing_key="a signing key of the tests")
print("ready", flush=True)
for step in range(1, 100_000):
    time.sleep(0.002)
    if moment == "before" and medic._queue.arrived:
        log.write("before\\n")
        time.sleep(60)
    for command in medic.commands(step):
        log.write(f"applied:{command.id}\\n")
        if moment == "while":
            log.write("while\\n")
            time.sleep(60)
        command.applied()
"""


def _process(url: str, log: Path, moment: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "sdk")}
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, url, str(log), moment],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )

    class Running:
        def __enter__(self) -> Any:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            return process

        def __exit__(self, *_: object) -> None:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    return Running()


# --- expiry -----------------------------------------------------------------------------------------


async def test_what_comes_too_late_is_answered_expired_and_may_come_again(
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


async def test_what_waits_too_long_for_the_loop_expires_and_may_come_again(
    redis_server: Any, client: Redis, start_job: Any
) -> None:
    """It was taken up, but the step took longer than the command was good for."""
    job = start_job(redis_server.url, signing_key=KEY)
    job.hold()
    sent = make_command(seconds=0.3)
    await put(client, sent)
    await asyncio.sleep(0.6)
    job.go_on()
    assert [reply.status for reply in await finals(client, sent.id)] == [envelope.EXPIRED]
    await put(client, again(sent))
    assert [reply.status for reply in await finals(client, sent.id, count=2)][1] == envelope.APPLIED
    assert job.done == [sent.id]


async def test_what_the_loop_lets_fall_is_answered_failed(
    redis_server: Any, client: Redis, start_job: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Once it has expired; a later answer is logged and changes nothing."""
    fallen: list[trainmedic.JobCommand] = []
    start_job(redis_server.url, fallen.append, signing_key=KEY)
    sent = make_command(seconds=3)  # enough for a slow machine to take it
    await put(client, sent)
    (reply,) = await finals(client, sent.id, seconds=15)
    assert (reply.status, reply.output["reason"]) == (
        envelope.FAILED,
        "the training loop took the command and did not answer it",
    )
    with caplog.at_level(logging.ERROR, "trainmedic"):
        fallen[0].applied()
    assert "comes too late" in caplog.text


async def test_a_job_that_ends_answers_what_it_leaves(redis_server: Any, client: Redis, start_job: Any) -> None:
    """Both what the loop has and what it did not come to."""
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


# --- undo ---------------------------------------------------------------------------------------------


async def test_an_undo_of_what_was_applied_is_applied(redis_server: Any, bus: RedisBus, start_job: Any) -> None:
    """Like any command; also by the next process."""
    job = start_job(redis_server.url, signing_key=KEY)
    done = make_command()
    await ask(bus, done)
    job.end()
    second = start_job(redis_server.url, signing_key=KEY)
    undo = make_command(params={"factor": 2.0}, undo_of=done.id)
    assert "nothing_to_undo" not in (await ask(bus, undo)).output
    assert second.done == [undo.id]


async def test_an_undo_of_what_was_not_applied_changes_nothing(
    redis_server: Any, bus: RedisBus, client: Redis, start_job: Any
) -> None:
    """Never seen, refused, or expired: success, with nothing done. What comes after its undo is not applied."""

    def act(given: trainmedic.JobCommand) -> None:
        given.rejected("no")

    job = start_job(redis_server.url, act, signing_key=KEY)
    refused, unseen, expired = make_command(), make_command(), make_command(seconds=-1)
    await ask(bus, refused)
    await put(client, expired)
    await eventually(lambda: _empty(client, envelope.job_commands("llm-1")))
    for original in (refused, unseen, expired):
        reply = await ask(bus, make_command(undo_of=original.id))
        assert (reply.status, reply.output) == (envelope.APPLIED, {"nothing_to_undo": True, "known": "never_applied"})
    assert (await ask(bus, unseen)).status == envelope.REJECTED
    assert job.done == [refused.id]


async def test_an_undo_waits_for_the_answer_to_what_it_takes_back(
    redis_server: Any, bus: RedisBus, start_job: Any
) -> None:
    """Both came in one step: whether there is something to undo is known after the first was answered."""
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


# --- Redis goes away ------------------------------------------------------------------------------------


async def test_training_goes_on_while_redis_is_dead_and_all_resumes_when_it_is_back(
    redis_server: Any, bus: RedisBus, start_job: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A command taken before the kill is answered after it, once; a new one waits and arrives; two log lines."""
    job = start_job(redis_server.url, signing_key=KEY)
    await ask(bus, make_command())
    job.hold()
    sent = make_command(seconds=20)
    asked = asyncio.create_task(ask(bus, sent))
    await eventually(lambda: len(job.medic._queue.arrived) == 1)
    with caplog.at_level(logging.INFO, "trainmedic"):
        redis_server.kill()
        job.go_on()
        await eventually(lambda: job.done[-1] == sent.id)
        step = job.medic.step
        await asyncio.sleep(0.3)
        assert job.medic.step > step + 10
        later = asyncio.create_task(ask(bus, make_command(seconds=20)))
        redis_server.start()
        assert (await asked).status == envelope.APPLIED
        assert (await later).status == envelope.APPLIED
        await eventually(lambda: "connected to Redis again" in caplog.text)
    assert len(job.done) == 3
    assert caplog.text.count("no connection to Redis") == 1


async def test_a_job_may_start_before_its_server(redis_server: Any, bus: RedisBus, tmp_path: Path) -> None:
    """Without a URL it waits for the one that a server will leave in its state directory."""
    program = (
        "import sys, time, trainmedic\n"
        "medic = trainmedic.connect()\n"
        "print('ready', flush=True)\n"
        "for step in range(5000):\n"
        "    time.sleep(0.002)\n"
        "    for command in medic.commands(step):\n"
        "        command.applied()\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "sdk"),
        "TRAINMEDIC_JOB": "llm-1",
        "TRAINMEDIC_STATE_DIR": str(tmp_path),
        "TRAINMEDIC_SIGNING_KEY": KEY,
    }
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (tmp_path / "redis.url").write_text(redis_server.url + "\n")
        assert (await ask(bus, make_command(seconds=10))).status == envelope.APPLIED
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


# --- attackers, and mistakes ------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "another key"], ids=["unsigned", "wrong key"])
async def test_unsigned_and_wrongly_signed_commands_are_refused(
    redis_server: Any, client: Redis, start_job: Any, key: str | None
) -> None:
    """And leave no trace: the same command, signed rightly, is applied afterwards."""
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


async def test_a_genuine_command_of_another_job_is_refused(redis_server: Any, client: Redis, start_job: Any) -> None:
    """A signature does not help who copies a command from one stream to another."""
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
    """They are answered by name."""
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
async def test_what_an_attacker_writes_does_not_stop_the_reader(
    redis_server: Any, bus: RedisBus, client: Redis, start_job: Any, fields: dict[str, bytes]
) -> None:
    """Unreadable messages are taken off, and the genuine command behind them is carried out."""
    job = start_job(redis_server.url, signing_key=KEY)
    await client.xadd(envelope.job_commands("llm-1"), fields)
    await client.xadd(envelope.REPLIES, {"reply": fields.get("command", b"")})
    assert (await ask(bus, make_command())).status == envelope.APPLIED
    assert len(job.done) == 1
    await eventually(lambda: _empty(client, envelope.job_commands("llm-1")))


async def test_a_forged_mark_cannot_make_a_command_apply_twice(
    redis_server: Any, bus: RedisBus, client: Redis, start_job: Any
) -> None:
    """What somebody else has written in the memory says nothing, so nothing is done and nothing is answered."""
    job = start_job(redis_server.url, signing_key=KEY)
    sent = make_command(seconds=1.0)
    await client.set(f"trainmedic:memory:job:llm-1:{sent.id}", b"\xff{")
    assert await bus.request(sent) == ()
    assert job.done == []


# --- how Redis is reached -----------------------------------------------------------------------------------


async def test_a_password_is_used_and_never_told(
    own_redis: Any, tmp_path: Path, start_job: Any, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both sides log in; when Redis dies neither side's log shows the password."""
    server = own_redis(tmp_path, password="correct-horse")
    server.start()
    bus = RedisBus(server.url, SystemClock(), telemetry.Metrics())
    await bus.start()
    with caplog.at_level(logging.DEBUG):
        start_job(server.url)
        assert (await ask(bus, make_command())).status == envelope.APPLIED
        server.kill()
        await bus.request(make_command(seconds=0.1))
    await bus.close()
    captured = capsys.readouterr()
    assert "correct-horse" not in caplog.text + captured.out + captured.err


async def test_tls_is_verified_on_both_sides(own_redis: Any, tmp_path: Path, start_job: Any) -> None:
    """With the authority named in the URL all works; without it nobody talks."""
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    make += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    make += ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "crt")]
    subprocess.run(make, check=True, capture_output=True)
    probe = own_redis(tmp_path)
    listening = ["--port", "0", "--tls-port", str(probe.port), "--tls-auth-clients", "no"]
    files = ["--tls-cert-file", str(tmp_path / "crt"), "--tls-key-file", str(tmp_path / "key")]
    server = own_redis(tmp_path, *listening, *files)
    server.port = probe.port
    server.start()
    url = f"rediss://127.0.0.1:{server.port}/0"
    trusted = f"{url}?ssl_ca_certs={tmp_path / 'crt'}"
    start_job(trusted)
    for address, answers in ((trusted, 1), (url, 0)):
        bus = RedisBus(address, SystemClock(), telemetry.Metrics())
        await bus.start()
        assert len(await bus.request(make_command(seconds=1.0))) == answers
        await bus.close()


async def _empty(client: Redis, stream: str) -> bool:
    return await client.xlen(stream) == 0
