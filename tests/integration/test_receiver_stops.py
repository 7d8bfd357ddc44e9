"""The receiver of commands is stopped while it hands one over: the command waits for the next process."""

from __future__ import annotations

import threading
from typing import Any

import redis

from tests.support.messages import GenuineCommandsOnly, make_command
from trainmedic.wire import envelope
from trainmedic.wire.connection import OutageLog, RedisConnection
from trainmedic.wire.receiver import Addressee, CommandReceiver, ReceivedCommand


class Connection(RedisConnection):
    """Says when it has been cut."""

    def __init__(self, url: str) -> None:
        super().__init__(lambda: url, OutageLog("llm-1"))
        self.is_cut = threading.Event()

    def cut(self) -> None:
        super().cut()
        self.is_cut.set()


class CutOff(GenuineCommandsOnly):
    """A consumer whose connection is cut beneath it; redis-py then fails with whatever its buffers raise."""

    def __init__(self, connection: Connection) -> None:
        self.has_begun = threading.Event()
        self._connection = connection

    def receive(self, received: ReceivedCommand) -> None:
        self.has_begun.set()
        assert self._connection.is_cut.wait(60)
        raise ValueError("I/O operation on closed file.")


def test_a_pending_command_is_left_for_the_next_job_when_the_job_ends(redis_url: str, caplog: Any) -> None:
    """It is neither removed from the stream nor rejected as impossible."""
    stream = envelope.job_commands("llm-1")
    connection = Connection(redis_url)
    consumer = CutOff(connection)
    addressee = Addressee("job", "llm-1", stream, "c", "llm-1")
    receiver = CommandReceiver(connection, addressee, None, consumer)
    with redis.Redis.from_url(redis_url) as client:
        client.xadd(stream, {"command": make_command().encode()})
        receiver.start()
        assert consumer.has_begun.wait(60)
        receiver.stop(timeout=60)
        assert client.xlen(stream) == 1
    assert "cannot process a message" not in caplog.text
