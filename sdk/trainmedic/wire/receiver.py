"""The thread that receives commands: it follows a Redis stream and hands on each command that is genuine.

A job and a node agent have one each. It is the one member of the stream's consumer group. Every entry is handed on
at least once: an entry that was not acknowledged is read again, by this process or the next one. This process does
not hand it on again while its answer waits to be sent. The thread survives an outage of Redis, a Redis that comes
back empty, and the loss of the consumer group.

Not here: what becomes of a genuine command (``trainmedic.job.queue``, the agent's ``command_runner``).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass
from typing import Any, Mapping, Protocol

import redis

from trainmedic.wire import envelope
from trainmedic.wire.connection import REDIS_ERRORS, RedisConnection
from trainmedic.wire.envelope import CONSUMER_GROUP, Command, EnvelopeError
from trainmedic.wire.log_limit import LogLimit
from trainmedic.wire.signing import BadSignature, Signer, signatures_of

log = logging.getLogger("trainmedic")

LARGEST_COMMAND = 256 * 1024
"""Bytes of the JSON of a command."""
_BLOCK_MS = 1000
_IN_HAND_SECONDS = 10.0
"""For so long, while a command is not answered, it asks for the next one and does not wait for it at Redis: the answer
goes by the same connection, and Redis ends a wait, however short, only when it looks at its timers, ten times a second.
After that the answer is held up by `_BLOCK_MS` at most."""
_FIRST_PAUSE, _PAUSE_SHARE = 0.005, 0.1
"""Seconds between two of these questions: the first, and a tenth of the time since the command."""
_PENDING_EVERY = 5.0
"""Seconds after which pending entries are read again: an earlier process may have been given a command in the moment
of its end."""
_COUNT = 20
"""Few, for each can be as large as Redis lets it be, and only who has read it knows."""
_EMPTY_ANSWER_WAIT = 0.25
"""Seconds to wait where Redis has answered at once that there is nothing, though it was asked to wait for it."""
_NO_GROUP_WAIT = 0.1
"""Seconds to wait before a deleted consumer group is created again."""


@dataclass(frozen=True)
class Addressee:
    """Whose commands are received."""

    kind: str
    """The member of a command's target that names the addressee: ``job``, ``node`` or ``launcher``."""
    name: str
    stream: str
    """The Redis stream of the commands."""
    consumer: str
    """What the process calls itself in the stream's consumer group; the same after a restart."""
    log_name: str
    """What messages in the log begin with."""


@dataclass(frozen=True)
class ReceivedCommand:
    """A command and the stream entry that it came with."""

    command: Command
    entry: bytes
    """The entry's id. The entry stays on the stream until the final reply has been written."""
    client: redis.Redis
    """The connection that it came by; only for the receiver's thread, while it hands the command over."""
    stream: str

    def drop(self) -> None:
        """Take the entry off the stream without a reply."""
        _drop(self.client, self.stream, self.entry)


class CommandConsumer(Protocol):
    """Takes the received commands, in the receiver's thread. Errors of Redis may pass through."""

    def receive(self, received: ReceivedCommand) -> None:
        """A genuine command has come, perhaps not for the first time."""
        ...

    def refuse(self, received: ReceivedCommand, reason: str) -> None:
        """A command has come whose signature is wrong, or which is for another addressee."""
        ...

    def note_unreadable(self) -> None:
        """A message was no command at all; it is off the stream."""
        ...

    def connected(self, client: redis.Redis) -> None:
        """Redis is connected, for the first time or again; no command has been read yet."""
        ...


class CommandReceiver:
    """Receives the commands of one addressee and gives them to one consumer."""

    def __init__(
        self, connection: RedisConnection, addressee: Addressee, signer: Signer | None, consumer: CommandConsumer
    ) -> None:
        self._connection = connection
        self._addressee = addressee
        self._signer = signer
        self._consumer = consumer
        self._log_limit = LogLimit()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainmedic-receiver", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Cut the wait for the next command short, so that it goes to the next process, and end."""
        self._stopping.set()
        self._connection.cut()
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            # Every error is caught, because Redis may also answer in a shape that it should never use.
            except Exception as error:
                if self._stopping.is_set():
                    break
                is_group_gone = isinstance(error, redis.ResponseError) and "NOGROUP" in str(error)
                self._stopping.wait(_NO_GROUP_WAIT if is_group_gone else self._connection.failed(error))
        self._connection.close()

    def _follow(self) -> None:
        with self._connection.turn() as client:
            self._begin(client)
        # "0" reads what was delivered before, here or to a process that died, and not answered; ">" what is new.
        cursor = "0"
        read_pending_at = time.monotonic()
        while not self._stopping.is_set():
            with self._connection.turn() as current:
                if current is not client or self._stopping.is_set():
                    return  # the connection broke for another thread, and this is a new one
                asked_at = time.monotonic()
                since = self._connection.since_command(_IN_HAND_SECONDS)
                is_idle = since == math.inf
                entries = self._read(client, cursor, _BLOCK_MS if is_idle else None)
                took = time.monotonic() - asked_at
                for entry, fields in entries:
                    if not self._connection.is_answered(entry):
                        self._take_safely(client, entry, fields or {})
            self._connection.succeeded()
            if not entries and cursor == ">" and not is_idle:
                self._stopping.wait(_FIRST_PAUSE + _PAUSE_SHARE * since)
            elif not entries and cursor == ">" and took < _BLOCK_MS / 2000:
                self._stopping.wait(_EMPTY_ANSWER_WAIT)
            if cursor != ">":
                cursor = entries[-1][0].decode() if entries else ">"
            elif not entries and time.monotonic() - read_pending_at > _PENDING_EVERY:
                cursor, read_pending_at = "0", time.monotonic()

    def _begin(self, client: redis.Redis) -> None:
        try:
            client.xgroup_create(self._addressee.stream, CONSUMER_GROUP, id="0", mkstream=True)
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
        self._consumer.connected(client)

    def _read(self, client: redis.Redis, cursor: str, block_ms: int | None) -> Any:
        stream, consumer = self._addressee.stream, self._addressee.consumer
        answer: Any = client.xreadgroup(CONSUMER_GROUP, consumer, {stream: cursor}, count=_COUNT, block=block_ms)
        return answer[0][1] if answer else []

    def _take_safely(self, client: redis.Redis, entry: bytes, fields: Mapping[bytes, bytes]) -> None:
        try:
            self._take(client, entry, fields)
        except REDIS_ERRORS:
            raise
        # Every error is caught, because one message that cannot be dealt with must not stop those behind it.
        except Exception:
            if self._stopping.is_set():
                raise  # the connection was cut beneath it; the command is left for the next process
            name = self._addressee.log_name
            log.exception("%s: a message among the commands could not be dealt with and is left out", name)
            _drop(client, self._addressee.stream, entry)

    def _take(self, client: redis.Redis, entry: bytes, fields: Mapping[bytes, bytes]) -> None:
        addressee = self._addressee
        try:
            raw = envelope.body_of(fields, b"command")
            if len(raw) > LARGEST_COMMAND:
                raise EnvelopeError("the command is too large")
            command = Command.decode(raw)
        except EnvelopeError as error:
            self._warn("an unreadable message was found among the commands and is ignored: %s", str(error)[:200])
            self._consumer.note_unreadable()
            _drop(client, addressee.stream, entry)
            return
        self._connection.note_command(command.id)
        received = ReceivedCommand(command, entry, client, addressee.stream)
        try:
            if self._signer is not None:
                self._signer.verify(raw, signatures_of(fields))
            if command.target.get(addressee.kind) != addressee.name:
                raise BadSignature(f"is for another {addressee.kind}")
        except BadSignature as error:
            reason = f"the command {error}"
            self._warn("refused a command: %s", reason)
            self._consumer.refuse(received, reason)
            return
        self._consumer.receive(received)

    def _warn(self, message: str, reason: str) -> None:
        """Log what somebody has brought about who can write to Redis, if not too much of it was logged already."""
        if self._log_limit.lets_through():
            more = ". Others of these are not logged for a minute" if self._log_limit.is_last else ""
            log.warning("%s: " + message + "%s", self._addressee.log_name, reason, more)


def _drop(client: redis.Redis, stream: str, entry: bytes) -> None:
    client.xack(stream, CONSUMER_GROUP, entry)
    client.xdel(stream, entry)
