"""Thread that reads a Redis stream and passes on the genuine commands, each at least once.

It survives outages of Redis, an emptied Redis and a deleted consumer group.
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

LARGEST_COMMAND = 256 * 1024  # bytes of a command's JSON
_BLOCK_MS = 1000  # milliseconds that a read waits for a command; the other threads wait for their turn meanwhile
# Seconds after a command in which reads do not block: the answer uses the same connection, and Redis ends blocking
# reads only ten times a second.
_IN_HAND_SECONDS = 10.0
_FIRST_PAUSE, _PAUSE_SHARE = 0.005, 0.1  # seconds, and share of the time since the command
_PENDING_EVERY = 5.0  # seconds between reads of unanswered entries, which an ending process may have left
_ENTRIES_PER_READ = 20  # each may be very large
_EMPTY_ANSWER_WAIT = 0.25  # seconds after a read that was empty too early, so that the loop does not spin
_NO_GROUP_WAIT = 0.1  # seconds until a deleted consumer group is created again


@dataclass(frozen=True)
class Addressee:
    kind: str  # member of the command's target: "job", "node" or "launcher"
    name: str
    stream: str
    consumer: str
    log_name: str


@dataclass(frozen=True)
class ReceivedCommand:
    command: Command
    entry: bytes  # Entry ID, on the stream until the final reply
    client: redis.Redis  # Connection, only during the delivery
    stream: str

    def drop(self) -> None:
        _drop(self.client, self.stream, self.entry)


class CommandConsumer(Protocol):
    """Consumer in the receiver's thread. It may raise Redis errors."""

    def receive(self, received: ReceivedCommand) -> None: ...

    def refuse(self, received: ReceivedCommand, reason: str) -> None: ...

    def note_unreadable(self) -> None: ...

    def connected(self, client: redis.Redis) -> None: ...  # before the first read of each new connection


class CommandReceiver:
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
        self._stopping.set()
        self._connection.cut()
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
            # Catch everything: Redis may answer in an unexpected shape.
            except Exception as error:
                if self._stopping.is_set():
                    break
                is_group_gone = isinstance(error, redis.ResponseError) and "NOGROUP" in str(error)
                self._stopping.wait(_NO_GROUP_WAIT if is_group_gone else self._connection.failed(error))
        self._connection.close()

    def _follow(self) -> None:
        with self._connection.turn() as client:
            self._begin(client)
        # "0" reads entries that were delivered earlier and not answered, to any process; ">" reads new ones.
        cursor = "0"
        read_pending_at = time.monotonic()
        while not self._stopping.is_set():
            with self._connection.turn() as current:
                if current is not client or self._stopping.is_set():
                    return  # another thread's break replaced the client
                asked_at = time.monotonic()
                since = self._connection.since_command(_IN_HAND_SECONDS)
                is_idle = since == math.inf
                entries = self._read(client, cursor, _BLOCK_MS if is_idle else None)
                took = time.monotonic() - asked_at
                for entry, fields in entries:
                    if entry not in self._connection.answered:
                        self._take_safely(client, entry, fields or {})
            self._connection.succeeded()
            if not entries and cursor == ">" and not is_idle:
                self._stopping.wait(_FIRST_PAUSE + _PAUSE_SHARE * since)
            elif not entries and cursor == ">" and took < _BLOCK_MS / 2000:  # Redis did not block
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
        answer: Any = client.xreadgroup(
            CONSUMER_GROUP, consumer, {stream: cursor}, count=_ENTRIES_PER_READ, block=block_ms
        )
        return answer[0][1] if answer else []

    def _take_safely(self, client: redis.Redis, entry: bytes, fields: Mapping[bytes, bytes]) -> None:
        try:
            self._take(client, entry, fields)
        except REDIS_ERRORS:
            raise
        # Catch everything: one bad message must not block those after it.
        except Exception:
            if self._stopping.is_set():
                raise  # the connection was cut; the next process reads the command
            name = self._addressee.log_name
            log.exception("%s: cannot process a message among the commands; skipping it", name)
            _drop(client, self._addressee.stream, entry)

    def _take(self, client: redis.Redis, entry: bytes, fields: Mapping[bytes, bytes]) -> None:
        addressee = self._addressee
        try:
            raw = envelope.body_of(fields, b"command")
            if len(raw) > LARGEST_COMMAND:
                raise EnvelopeError("the command is too large")
            command = Command.decode(raw)
        except EnvelopeError as error:
            self._warn("ignoring an unreadable message among the commands: %s", str(error)[:200])
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
        if self._log_limit.lets_through():
            more = "; not logging more of these for a minute" if self._log_limit.is_last else ""
            log.warning("%s: " + message + "%s", self._addressee.log_name, reason, more)


def _drop(client: redis.Redis, stream: str, entry: bytes) -> None:
    client.xack(stream, CONSUMER_GROUP, entry)
    client.xdel(stream, entry)
