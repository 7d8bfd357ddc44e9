"""An entry of a command stream that is read again before its answer is sent is not answered a second time."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.support.messages import GenuineCommandsOnly, make_command
from tests.support.programs import eventually
from trainmedic.wire import envelope, receiver
from trainmedic.wire import writer as writing
from trainmedic.wire.command_memory import CommandMemory
from trainmedic.wire.connection import OutageLog, RedisConnection
from trainmedic.wire.receiver import Addressee, CommandReceiver, ReceivedCommand
from trainmedic.wire.writer import OutgoingReplies, PresenceKey, ReplyWriter

JOB = "pending-test"
STREAM = envelope.job_commands(JOB)


class Answering(GenuineCommandsOnly):
    """Receives the job's commands and answers each as often as it is handed on; its writer is started by the test."""

    def __init__(self, url: str) -> None:
        self.handed_on: list[bytes] = []
        self.is_writing = False
        connection = RedisConnection(lambda: url, OutageLog(JOB))
        self.writer = ReplyWriter(
            connection,
            CommandMemory(f"job:{JOB}", "one"),
            STREAM,
            PresenceKey(envelope.job_presence(JOB), JOB, dict, lambda _: None),
            None,
        )
        addressee = Addressee("job", JOB, STREAM, "rank-0", JOB)
        self.receiver = CommandReceiver(connection.shared(), addressee, None, self)

    def start_writing(self) -> None:
        self.is_writing = True
        self.writer.start()

    def receive(self, received: ReceivedCommand) -> None:
        self.handed_on.append(received.entry)
        reply = envelope.Reply(received.command.id, f"{JOB}/0", envelope.APPLIED, 0, {}, job=JOB, ranks=1)
        self.writer.put(OutgoingReplies((reply,), received.entry))


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as connected:
        yield connected
        connected.delete(STREAM)


@pytest.fixture
def answering(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Answering]:
    """One that looks for unanswered entries many times a second."""
    monkeypatch.setattr(receiver, "_PENDING_EVERY", 0.02)
    one = Answering(redis_url)
    one.receiver.start()
    yield one
    one.receiver.stop(10)
    if one.is_writing:
        one.writer.stop(10)


def replies(client: redis.Redis, sent: envelope.Command) -> list[envelope.Reply]:
    entries: Any = client.xrange(envelope.REPLIES)
    return [reply for _, fields in entries if (reply := envelope.Reply.of_entry(fields)).command_id == sent.id]


def test_an_entry_whose_answer_is_pending_is_not_answered_again(client: redis.Redis, answering: Answering) -> None:
    """A slow writer or an outage does not duplicate a reply."""
    sent = make_command(job=JOB)
    client.xadd(STREAM, {"command": sent.encode()})
    eventually(lambda: answering.handed_on, 60, "the command", every=0.01)
    time.sleep(0.5)  # in which the entry is read again many times
    answering.start_writing()
    eventually(lambda: client.xlen(STREAM) == 0, 60, "the entry off the stream", every=0.01)
    assert len(answering.handed_on) == 1
    assert [reply.status for reply in replies(client, sent)] == ["applied"]


def test_an_entry_whose_answer_had_no_capacity_is_answered_again(
    client: redis.Redis, answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many replies were pending at the first answer."""
    monkeypatch.setattr(answering.writer, "_queue", queue.Queue(1))
    answering.writer.announce()  # which takes the one place that there is
    sent = make_command(job=JOB)
    client.xadd(STREAM, {"command": sent.encode()})
    eventually(lambda: len(answering.handed_on) > 2, 60, "the command, several times", every=0.01)
    answering.start_writing()
    eventually(lambda: client.xlen(STREAM) == 0, 60, "the entry off the stream", every=0.01)
    assert {reply.status for reply in replies(client, sent)} == {"applied"}


def test_an_entry_whose_answer_redis_rejected_is_answered_again(
    client: redis.Redis, answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer dropped it to unblock the replies after it."""
    append = answering.writer._append
    quoted = "Command # 1 (XADD a of pipeline caused error: BUSY b) of pipeline caused error: ERR refused"
    refusals = [redis.ResponseError(quoted)]

    def refuse_once(*arguments: Any) -> None:
        if refusals:
            raise refusals.pop()
        append(*arguments)

    monkeypatch.setattr(writing, "_MOST_REFUSALS", 1)
    monkeypatch.setattr(answering.writer, "_append", refuse_once)
    sent = make_command(job=JOB)
    client.xadd(STREAM, {"command": sent.encode()})
    answering.start_writing()
    eventually(lambda: client.xlen(STREAM) == 0, 60, "the entry off the stream", every=0.01)
    assert len(answering.handed_on) == 2
    assert [reply.status for reply in replies(client, sent)] == ["applied"]


@pytest.mark.parametrize(
    "error",
    [
        redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
        redis.ResponseError("Command # 1 (XADD a b) of pipeline caused error: MISCONF Redis is unable to persist"),
        redis.ResponseError("Command # 1 (XADD a b) of pipeline caused error: BUSY Redis is busy running a script."),
    ],
)
def test_an_answer_waits_until_redis_accepts_writes_again(
    client: redis.Redis, answering: Answering, monkeypatch: pytest.MonkeyPatch, error: redis.ResponseError
) -> None:
    """It is not dropped; a notice is not, either, because no one would ask for it again."""
    append = answering.writer._append
    refusals = [error] * 3

    def refuse(*arguments: Any) -> None:
        if refusals:
            raise refusals.pop()
        append(*arguments)

    monkeypatch.setattr(writing, "_MOST_REFUSALS", 1)
    monkeypatch.setattr(answering.writer, "_append", refuse)
    sent = make_command(job=JOB)
    client.xadd(STREAM, {"command": sent.encode()})
    answering.start_writing()
    eventually(lambda: client.xlen(STREAM) == 0, 60, "the entry off the stream", every=0.01)
    assert len(answering.handed_on) == 1
    assert [reply.status for reply in replies(client, sent)] == ["applied"]
