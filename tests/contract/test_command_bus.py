"""What every command bus promises, on the real one: Redis Streams, with a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from tests.support.messages import make_command
from trainmedic.envelope import verify
from trainmedic.wire import envelope
from trainmedic.wire.envelope import Command, Reply
from trainmedic.wire.signing import Signer
from trainmedic_server import errors, telemetry
from trainmedic_server.adapters import redis_bus, redis_replies
from trainmedic_server.adapters.redis_bus import RedisBus
from trainmedic_server.adapters.system_clock import SystemClock

KEY = b"a signing key of the tests"


class Bench:
    """A bus, its metrics, the late replies that it handed on, and a client to play the receivers with."""

    def __init__(self, url: str, signer: Signer | None = None) -> None:
        self.metrics = telemetry.Metrics()
        self.late: list[Reply] = []
        self.store_is_away = False
        self.bus = RedisBus(url, SystemClock(), self.metrics, signer, on_late_reply=self._note)
        self.redis: Redis = Redis.from_url(url, protocol=2)

    async def _note(self, reply: Reply) -> None:
        self.late.append(reply)
        if self.store_is_away:
            raise errors.StoreUnavailable("the run store could not commit")

    def refused(self, reason: str) -> float:
        return self.metrics.registry.get_sample_value("trainmedic_refused_messages_total", {"reason": reason}) or 0.0

    async def present(self, job: str, **details: Any) -> None:
        said = {"job": job, "at": envelope.write_time(datetime.now(UTC)), **details}
        await self.redis.set(envelope.job_presence(job), json.dumps(said), ex=15)

    async def commands(self, job: str) -> list[dict[bytes, bytes]]:
        return [fields for _, fields in await self.redis.xrange(envelope.job_commands(job))]

    async def answer(
        self,
        command_id: str,
        status: str = envelope.APPLIED,
        rank: int | None = 0,
        ranks: int | None = None,
        **output: Any,
    ) -> None:
        await self.write(Reply(command_id, "test", status, rank, output, ranks=ranks).encode())

    async def write(self, raw: bytes) -> None:
        await self.redis.xadd(envelope.REPLIES, {"reply": raw})

    async def pending(self) -> int:
        """Replies that would be delivered again after a restart."""
        try:
            return int((await self.redis.xpending(envelope.REPLIES, "trainmedic"))["pending"])
        except Exception:
            return 0


async def until(holds: Callable[[], Awaitable[bool]], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not await holds():
            await asyncio.sleep(0.005)


@pytest.fixture
async def bench(redis_server: Any) -> AsyncIterator[Bench]:
    made = Bench(redis_server.url)
    await made.bus.start()
    yield made
    await made.bus.close()
    await made.redis.aclose()


@contextlib.asynccontextmanager
async def another(url: str, **options: Any) -> AsyncIterator[Bench]:
    made = Bench(url, **options)
    await made.bus.start()
    try:
        yield made
    finally:
        await made.bus.close()
        await made.redis.aclose()


async def test_a_command_reaches_its_stream_and_its_reply_comes_back(bench: Bench) -> None:
    """The receiver finds the exact envelope on its own stream; the caller gets the reply."""
    sent = make_command()
    asked = asyncio.create_task(bench.bus.request(sent))
    await until(lambda: _true(bench.commands("llm-1")))
    (fields,) = await bench.commands("llm-1")
    assert Command.decode(fields[b"command"]) == sent
    assert b"signature" not in fields
    await bench.answer(sent.id, previous=0.1)
    (reply,) = await asked
    assert (reply.status, reply.rank, reply.output) == (envelope.APPLIED, 0, {"previous": 0.1})


async def test_a_node_command_goes_to_the_agent(bench: Bench) -> None:
    """A target without a job is a node; one reply without a rank is the whole answer."""
    sent = make_command(action="gpu.power_limit", target={"kind": "gpu", "node": "n1", "gpu": "0"})
    asked = asyncio.create_task(bench.bus.request(sent))
    await until(lambda: _true(bench.redis.exists(envelope.node_commands("n1"))))
    await bench.answer(sent.id, rank=None)
    assert [reply.rank for reply in await asked] == [None]


async def test_commands_are_signed_if_a_key_is_in_use(redis_server: Any) -> None:
    """The signature covers the exact bytes on the stream."""
    async with another(redis_server.url, signer=Signer.of(KEY)) as bench:
        sent = make_command(seconds=0.2)
        await bench.bus.request(sent)
        (fields,) = await bench.commands("llm-1")
        verify(fields[b"command"], fields[b"signature"], KEY)
        with pytest.raises(envelope.EnvelopeError):
            verify(fields[b"command"], fields[b"signature"], b"another key")


async def test_every_rank_in_the_jobs_presence_must_answer(bench: Bench) -> None:
    """The caller waits for all ranks of the presence, and gets each one's reply."""
    await bench.present("llm-1", ranks=[0, 1, 2])
    sent = make_command()
    asked = asyncio.create_task(bench.bus.request(sent))
    for rank in (2, 0):
        await bench.answer(sent.id, rank=rank)
    await asyncio.sleep(0.1)
    assert not asked.done()
    await bench.answer(sent.id, rank=1)
    assert sorted(reply.rank or 0 for reply in await asked) == [0, 1, 2]


async def test_a_job_that_connects_after_sending_determines_who_must_answer(bench: Bench) -> None:
    """One rank's reply does not count for all if the job has reported more ranks since."""
    sent = make_command()
    asked = asyncio.create_task(bench.bus.request(sent))
    await until(lambda: _true(bench.commands("llm-1")))
    await bench.present("llm-1", ranks=[0, 1])
    await bench.answer(sent.id, rank=0)
    await asyncio.sleep(0.1)
    assert not asked.done()
    await bench.answer(sent.id, rank=1)
    assert len(await asked) == 2


async def test_a_reply_states_the_number_of_ranks(bench: Bench) -> None:
    """Without a presence, or with another one, a job of two ranks has not applied what only one has, and one
    that came back with fewer ranks is not waited for."""
    sent = make_command()
    asked = asyncio.create_task(bench.bus.request(sent))
    await bench.answer(sent.id, rank=0, ranks=2)
    await asyncio.sleep(0.1)
    assert not asked.done()
    await bench.answer(sent.id, envelope.FAILED, rank=1, ranks=2)
    assert sorted(reply.status for reply in await asked) == [envelope.APPLIED, envelope.FAILED]
    await bench.present("llm-1", ranks=[0, 1, 2])
    sent = make_command()
    asked = asyncio.create_task(bench.bus.request(sent))
    await bench.answer(sent.id, rank=0, ranks=1)
    assert [reply.rank for reply in await asked] == [0]


async def test_replies_received_by_the_expiry_are_returned(bench: Bench) -> None:
    """The wait ends a second after the expiry; a rank that accepted the command but did not finish is named."""
    await bench.present("llm-1", ranks=[0, 1])
    sent = make_command(seconds=3)
    began = datetime.now(UTC)
    asked = asyncio.create_task(bench.bus.request(sent))
    await bench.answer(sent.id, rank=0)
    await bench.answer(sent.id, envelope.ACCEPTED, rank=1)
    replies = await asked
    assert [(reply.rank, reply.status) for reply in replies] == [(0, envelope.APPLIED), (1, envelope.ACCEPTED)]
    assert 3.9 < (datetime.now(UTC) - began).total_seconds() < 30


async def test_a_reply_is_delivered_again_until_it_is_settled(bench: Bench) -> None:
    """Only `acknowledge` removes a reply from the stream; then nothing of it is left in Redis."""
    sent = make_command()
    asked = asyncio.create_task(bench.bus.request(sent))
    await bench.answer(sent.id)
    await asked
    assert await bench.pending() == 1
    bench.bus.acknowledge(sent.id)
    await until(lambda: _is(bench.redis.xlen(envelope.REPLIES), 0))
    assert await bench.pending() == 0


async def _read_early(bench: Bench, command_id: str) -> bool:
    """Whether the bus has read a reply that nobody has asked for yet."""
    return command_id in bench.bus._router._early


async def test_an_unsettled_reply_reaches_the_next_caller_after_a_restart(redis_server: Any) -> None:
    """A server killed between reply and commit gets the reply again, and does not resend the command."""
    sent = make_command()
    async with another(redis_server.url) as bench:
        await bench.present("llm-1", ranks=[0])
        asked = asyncio.create_task(bench.bus.request(sent))
        await bench.answer(sent.id, restored=900)
        await asked
    async with another(redis_server.url) as bench:
        await until(lambda: _read_early(bench, sent.id))
        assert bench.late == []
        (reply,) = await bench.bus.request(sent)
        assert reply.output == {"restored": 900}
        assert len(await bench.commands("llm-1")) == 1
        bench.bus.acknowledge(sent.id)
        await until(lambda: _is(bench.redis.xlen(envelope.REPLIES), 0))


async def test_a_reply_that_came_without_a_running_server_reaches_the_next_caller(redis_server: Any) -> None:
    """It waits on the stream for the server that recovers the run."""
    sent = make_command()
    async with another(redis_server.url) as bench:
        asked = asyncio.create_task(bench.bus.request(sent))
        await until(lambda: _true(bench.commands("llm-1")))
        asked.cancel()
    async with another(redis_server.url) as bench:
        await bench.answer(sent.id)
        assert [reply.status for reply in await bench.bus.request(sent)] == [envelope.APPLIED]


async def test_sending_again_while_the_first_is_awaited_is_safe(bench: Bench) -> None:
    """Two callers with one command id both get the reply."""
    sent = make_command()
    both = [asyncio.create_task(bench.bus.request(sent)) for _ in range(2)]
    await until(lambda: _true(bench.commands("llm-1")))
    await bench.answer(sent.id)
    assert [len(replies) for replies in await asyncio.gather(*both)] == [1, 1]


async def test_the_first_reply_of_a_rank_counts(bench: Bench) -> None:
    """Replies are delivered at least once; repeats change nothing and do not accumulate."""
    await bench.present("llm-1", ranks=[0, 1])
    sent = make_command()
    asked = asyncio.create_task(bench.bus.request(sent))
    await bench.answer(sent.id, rank=0)
    await bench.answer(sent.id, envelope.FAILED, rank=0)
    await bench.answer(sent.id, rank=1)
    assert {reply.status for reply in await asked} == {envelope.APPLIED}
    await bench.answer(sent.id, rank=1)
    bench.bus.acknowledge(sent.id)
    await until(lambda: _is(bench.redis.xlen(envelope.REPLIES), 0))
    assert (bench.late, bench.refused("unmatched")) == ([], 0.0)


async def test_a_reply_after_the_caller_gave_up_is_forwarded_and_counted(bench: Bench) -> None:
    """It is not lost silently: the history can still show that the command was applied."""
    sent = make_command(seconds=0.05)
    assert await bench.bus.request(sent) == ()
    bench.bus.acknowledge(sent.id)
    await bench.answer(sent.id)
    await until(lambda: _is(bench.redis.xlen(envelope.REPLIES), 0))
    assert [reply.command_id for reply in bench.late] == [sent.id]
    assert bench.refused("unmatched") == 1


async def test_a_server_that_may_not_act_leaves_the_replies(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It logs this without a traceback and counts no loop error."""
    asked = asyncio.Event()

    def fence() -> None:
        if not asked.is_set():
            asked.set()
            raise errors.StoreUnavailable("this server does not work any more")

    metrics = telemetry.Metrics()
    bus = RedisBus(redis_url, SystemClock(), metrics, None, fence=fence)
    await bus.start()
    async with asyncio.timeout(60):
        await asked.wait()
    await bus.close()
    assert "Traceback" not in "".join(capsys.readouterr())
    assert not metrics.registry.get_sample_value("trainmedic_loop_errors_total", {"loop": "replies"})


async def test_a_late_reply_that_the_store_cannot_take_is_forwarded_at_the_next_start(
    bench: Bench, redis_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store outage is an expected error and loses no reply."""
    monkeypatch.setattr(redis_replies, "GRACE", timedelta(seconds=0.1))
    bench.store_is_away = True
    sent = make_command(seconds=0.05)
    assert await bench.bus.request(sent) == ()
    bench.bus.acknowledge(sent.id)
    await bench.answer(sent.id)
    await until(lambda: _true(_have(bench.late)))
    await bench.bus.close()
    assert await bench.pending() == 1
    assert "Traceback" not in "".join(capsys.readouterr())
    async with another(redis_url) as restarted:
        await until(lambda: _true(_have(restarted.late)), 20)
        assert [reply.command_id for reply in restarted.late] == [sent.id]
        await until(lambda: _is(restarted.redis.xlen(envelope.REPLIES), 0))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"command_id": 7}',
        b'{"command_id": "x", "status": "splendid"}',
        b'{"command_id": "x", "status": "applied", "rank": "first"}',
        b"[" * 100_000,
        b'{"command_id": "x", "status": "applied", "pad": "' + b"x" * 300_000 + b'"}',
    ],
    ids=["empty", "cut", "list", "not utf-8", "id", "status", "rank", "deep", "large"],
)
async def test_unreadable_replies_are_counted_and_removed(bench: Bench, raw: bytes) -> None:
    """A writer to Redis cannot stop the reader."""
    await bench.write(raw)
    await bench.redis.xadd(envelope.REPLIES, {"other": "field"})
    await until(lambda: _is(bench.redis.xlen(envelope.REPLIES), 0))
    assert bench.refused("unreadable") == 2
    sent = make_command()
    asked = asyncio.create_task(bench.bus.request(sent))
    await bench.answer(sent.id)
    assert len(await asked) == 1


@pytest.mark.parametrize("name", ["data", "payload", "message"])
async def test_a_reply_is_accepted_whatever_its_field_is_called(bench: Bench, name: str) -> None:
    """A receiver that knows the members of a reply need not know its field's name."""
    sent = make_command()
    asked = asyncio.create_task(bench.bus.request(sent))
    await bench.redis.xadd(envelope.REPLIES, {"source": "job", name: Reply(sent.id, "test", "applied", 0).encode()})
    assert [(reply.status, reply.rank) for reply in await asked] == [("applied", 0)]


async def test_a_reply_is_accepted_as_separate_fields(bench: Bench) -> None:
    """Each member may have its own field: numbers are text then, and the output is JSON."""
    sent = make_command()
    asked = asyncio.create_task(bench.bus.request(sent))
    members: Any = {"command_id": sent.id, "from": "job", "rank": "3", "status": "applied", "output": '{"lr": 0.1}'}
    await bench.redis.xadd(envelope.REPLIES, {**members, "at": "2026-01-31T12:00:00Z"})
    (reply,) = await asked
    assert (reply.rank, reply.output, reply.at.year) == (3, {"lr": 0.1}, 2026)


@pytest.mark.parametrize(
    "changes",
    [{"at": "2026-01-31T12:00:00"}, {"at": 1769860800}, {"rank": "0"}, {"status": "APPLIED"}, {"output": "done"}],
    ids=["time without a zone", "time in seconds", "rank as text", "status in capitals", "output as text"],
)
async def test_a_harmless_defect_does_not_lose_the_reply(bench: Bench, changes: dict[str, Any]) -> None:
    """A rejected reply leaves the outcome unknown, so only the members that determine it are required."""
    sent = make_command()
    asked = asyncio.create_task(bench.bus.request(sent))
    said = {"command_id": sent.id, "from": "job", "rank": 0, "status": "applied", "output": {}, **changes}
    await bench.write(json.dumps(said).encode())
    assert [reply.status for reply in await asked] == ["applied"]


@pytest.mark.parametrize(
    "said",
    [
        {"output": {"reason": "out of memory"}},
        {"output": {"error": "out of memory"}},
        {"output": "out of memory"},
        {"reason": "out of memory"},
        {"message": "out of memory", "output": {"step": 7}},
    ],
    ids=["reason", "error", "text", "beside the output", "message"],
)
async def test_the_reason_is_found_wherever_the_receiver_put_it(bench: Bench, said: dict[str, Any]) -> None:
    """The cause of a failure reaches the history."""
    sent = make_command()
    asked = asyncio.create_task(bench.bus.request(sent))
    await bench.write(json.dumps({"command_id": sent.id, "rank": 0, "status": "failed", **said}).encode())
    (reply,) = await asked
    assert reply.output["reason"] == "out of memory"


async def test_a_silent_receiver_is_reported_once_and_may_end_the_wait(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver is not connected and silent for some seconds: the caller decides whether to keep waiting."""
    monkeypatch.setattr(redis_bus, "UNHEARD_AFTER", timedelta(seconds=0.1))
    asked: list[bool] = []

    def answering(ends: bool) -> Callable[[], Awaitable[bool]]:
        async def unheard() -> bool:
            asked.append(ends)
            return ends

        return unheard

    began = datetime.now(UTC)
    assert await bench.bus.request(make_command(job="gone"), answering(True)) == ()
    assert datetime.now(UTC) - began < timedelta(seconds=20)
    await bench.present("there")
    await asyncio.gather(
        bench.bus.request(make_command(job="waited-for", seconds=0.3), answering(False)),
        bench.bus.request(make_command(job="there", seconds=0.3), answering(False)),
    )
    assert asked == [True, False]


async def test_many_commands_are_sent_at_once(bench: Bench) -> None:
    """A thousand commands are on their streams, each once, before any is answered; each gets its own reply."""
    sent = [make_command(job=f"job-{number}", seconds=60) for number in range(1000)]
    asked = [asyncio.create_task(bench.bus.request(one)) for one in sent]
    await until(lambda: _is(bench.redis.dbsize(), 1001))
    for one in sent:
        await bench.answer(one.id, job=one.target["job"])
    for one, replies in zip(sent, await asyncio.gather(*asked), strict=True):
        assert [reply.output["job"] for reply in replies] == [one.target["job"]]
    for one in sent:
        bench.bus.acknowledge(one.id)
    await until(lambda: _is(bench.redis.xlen(envelope.REPLIES), 0))


async def test_the_streams_of_dead_jobs_expire(bench: Bench) -> None:
    """A command stream expires, and its length is limited."""
    await bench.bus.request(make_command(seconds=0.05))
    left = await bench.redis.ttl(envelope.job_commands("llm-1"))
    assert 0 < left <= 24 * 3600
    for _ in range(3):
        await asyncio.gather(*(bench.bus.request(make_command(seconds=0.3)) for _ in range(600)))
    assert await bench.redis.xlen(envelope.job_commands("llm-1")) < 1500


async def test_commands_wait_while_redis_is_unavailable(redis_server: Any, bench: Bench) -> None:
    """A command issued during an outage is sent when Redis recovers; the outage is counted and reported."""
    redis_server.kill()
    sent = make_command(seconds=10)
    asked = asyncio.create_task(bench.bus.request(sent))
    with pytest.raises(errors.BusUnavailable):
        await bench.bus.check()
    await asyncio.sleep(0.2)
    redis_server.start()
    await until(lambda: _true(bench.commands("llm-1")))
    await bench.answer(sent.id)
    assert len(await asked) == 1
    assert (bench.metrics.registry.get_sample_value("trainmedic_bus_errors_total") or 0) > 0
    await until(lambda: _answers(bench.bus))


async def test_commands_expire_while_redis_is_unavailable(redis_server: Any, bench: Bench) -> None:
    """No one answers, nothing raises, and the expired command is not sent."""
    redis_server.kill()
    assert await bench.bus.request(make_command(seconds=0.1)) == ()
    redis_server.start()
    await until(lambda: _answers(bench.bus))
    assert await bench.commands("llm-1") == []


async def test_replies_survive_a_redis_kill(redis_server: Any, bench: Bench) -> None:
    """Replies unsettled at the kill are still there, once, when Redis recovers."""
    sent = make_command(seconds=10)
    asked = asyncio.create_task(bench.bus.request(sent))
    await bench.answer(sent.id)
    await asked
    redis_server.kill()
    redis_server.start()
    await until(lambda: _answers(bench.bus))
    assert await bench.pending() == 1
    bench.bus.acknowledge(sent.id)
    await until(lambda: _is(bench.redis.xlen(envelope.REPLIES), 0))
    assert bench.late == []


async def test_the_reader_recovers_after_redis_lost_everything(bench: Bench) -> None:
    """The consumer group is created again."""
    await bench.redis.flushall()
    sent = make_command()
    asked = asyncio.create_task(bench.bus.request(sent))
    await until(lambda: _true(bench.commands("llm-1")))
    await until(lambda: _is_not(bench.redis.exists(envelope.REPLIES), 0))
    await bench.answer(sent.id)
    assert len(await asked) == 1


async def test_one_broken_stream_does_not_delay_the_others(bench: Bench) -> None:
    """A key of the wrong type blocks only its own job's commands."""
    await bench.redis.set(envelope.job_commands("spoilt"), "x")
    spoilt, sound = make_command(job="spoilt", seconds=1.0), make_command(job="sound")
    asked = [asyncio.create_task(bench.bus.request(one)) for one in (spoilt, sound)]
    await bench.answer(sound.id)
    assert [len(replies) for replies in await asyncio.gather(*asked)] == [0, 1]


async def test_connected_jobs_and_agents_are_listed(bench: Bench) -> None:
    """They are listed with what they published; other keys under their prefix are listed by name."""
    at = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
    await bench.present("llm-1", ranks=[0], at=envelope.write_time(at))
    await bench.redis.set(envelope.job_presence("other"), "1")
    await bench.redis.set(envelope.job_presence("no-time"), '{"at": 7}')
    await bench.redis.rpush(envelope.job_presence("bad-type"), "x")
    await bench.redis.set(envelope.agent_presence("n1"), json.dumps({"at": envelope.write_time(at)}))
    first, second = await asyncio.gather(bench.bus.jobs(), bench.bus.jobs())
    assert [one.name for one in first] == [one.name for one in second] == ["llm-1", "no-time", "other"]
    assert (first[0].last_seen, first[0].details["ranks"]) == (at, [0])
    assert all(datetime.now(UTC) - one.last_seen < timedelta(minutes=1) for one in first[1:])
    assert [one.name for one in await bench.bus.agents()] == ["n1"]


async def test_listing_while_redis_is_unavailable_reports_it(redis_server: Any, bench: Bench) -> None:
    """The error is one of ours and does not contain the URL."""
    redis_server.kill()
    with pytest.raises(errors.BusUnavailable) as caught:
        await bench.bus.jobs()
    assert str(redis_server.port) not in str(caught.value)


async def _true(value: Awaitable[Any]) -> bool:
    return bool(await value)


async def _is(value: Awaitable[Any], wanted: Any) -> bool:
    return bool(await value == wanted)


async def _is_not(value: Awaitable[Any], unwanted: Any) -> bool:
    return bool(await value != unwanted)


async def _answers(bus: RedisBus) -> bool:
    try:
        await bus.check()
    except errors.BusUnavailable:
        return False
    return True


async def test_a_command_that_redis_lost_is_sent_again(bench: Bench) -> None:
    """A Redis that restarts empty has lost all commands in flight; the caller still gets an answer."""
    sent = make_command(seconds=20)
    asked = asyncio.create_task(bench.bus.request(sent))
    await until(lambda: _true(bench.commands("llm-1")))
    await bench.redis.flushall()
    await until(lambda: _true(bench.commands("llm-1")))
    await bench.answer(sent.id)
    assert [reply.status for reply in await asked] == [envelope.APPLIED]


async def test_an_expired_reply_to_an_earlier_sending_is_ignored(bench: Bench) -> None:
    """The receiver finds both sendings at once, refuses the first and applies the second."""
    first = make_command(seconds=0.2)
    assert await bench.bus.request(first) == ()
    second = make_command(id=first.id, seconds=5)
    asked = asyncio.create_task(bench.bus.request(second))
    await until(lambda: _is(bench.redis.xlen(envelope.job_commands("llm-1")), 2))
    await bench.answer(first.id, envelope.EXPIRED, reason="it arrived after its expiry")
    await bench.answer(first.id, envelope.ACCEPTED)
    await asyncio.sleep(0.1)
    assert not asked.done()
    await bench.answer(first.id, step=7)
    assert [(reply.status, reply.output) for reply in await asked] == [(envelope.APPLIED, {"step": 7})]


async def test_an_undeclared_connection_error_does_not_stop_the_sender(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender continues after a short delay."""
    execute = Pipeline.execute
    failures = iter([RuntimeError("unable to perform operation on <TCPTransport closed=True>")])

    async def fails_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        for failure in failures:
            raise failure
        return await execute(self, *args, **kwargs)

    monkeypatch.setattr(Pipeline, "execute", fails_once)
    sent = make_command()
    asked = asyncio.create_task(bench.bus.request(sent))
    await until(lambda: _true(bench.commands("llm-1")))
    await bench.answer(sent.id)
    assert len(await asked) == 1


async def test_invalid_unicode_in_a_reply_is_replaced(bench: Bench) -> None:
    """A file name that is not UTF-8 arrives as half a surrogate pair, which could not be stored or sent."""
    sent = make_command()
    asked = asyncio.create_task(bench.bus.request(sent))
    await bench.answer(sent.id, checkpoint="/ckpt/\udcff")
    (reply,) = await asked
    assert reply.output == {"checkpoint": "/ckpt/?"}


async def test_a_reply_read_before_the_command_is_sent_again_is_the_answer(bench: Bench) -> None:
    """After a restart, earlier replies are read again at once; then nothing is sent or awaited."""

    async def unheard() -> bool:
        raise AssertionError("it was answered")

    sent = make_command(seconds=30)
    asked = asyncio.create_task(bench.bus.request(sent, unheard))
    await asyncio.sleep(0)
    bench.bus._router.take(b"1-1", Reply(sent.id, "test", envelope.APPLIED, 0), datetime.now(UTC))
    async with asyncio.timeout(60):
        assert [reply.status for reply in await asked] == [envelope.APPLIED]
    assert await bench.commands("llm-1") == []


async def _have(replies: list[Reply]) -> bool:
    return bool(replies)


async def test_a_message_that_expects_no_reply_arrives(bench: Bench) -> None:
    """It is signed and sent like any command."""
    message = make_command("logs.withdraw")
    bench.bus.tell(message)
    async with asyncio.timeout(60):
        while not (sent := await bench.commands("llm-1")):
            await asyncio.sleep(0.02)
    assert [Command.decode(each[b"command"]).id for each in sent] == [message.id]
