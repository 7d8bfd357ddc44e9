"""Thread that writes replies, notices and the presence key to Redis.

Messages wait in its bounded queue during an outage.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Callable, Mapping, Sequence

import redis

from trainmedic.wire import envelope
from trainmedic.wire.command_book import CommandRecord
from trainmedic.wire.command_memory import SECONDS, CommandMemory
from trainmedic.wire.connection import REDIS_ERRORS, RedisConnection, redis_text
from trainmedic.wire.log_limit import LogLimit
from trainmedic.wire.notice import FIELD, Notice
from trainmedic.wire.output import LARGEST_REPLY, too_large
from trainmedic.wire.reading import read_object
from trainmedic.wire.signing import BadSignature, Signer, unseal

log = logging.getLogger("trainmedic")

STREAM_SECONDS = 24 * 3600  # expiry of the command stream after its receiver's end
LARGEST_PRESENCE = 1024 * 1024  # bytes; 8,192 ranks take about 800 KB
REPLIES_KEPT = 100_000  # entries of the stream of replies, about
_QUEUE = 1000  # messages
_BATCH = 100  # replies per transaction, after which it takes no further message
_MOST_REFUSALS = 5  # consecutive, until the messages are dropped
_LONGEST_REFUSAL = 30.0  # seconds in which the server repairs a tampered stream
# Redis refuses all writes, not one message: it is full, a replica, cannot save, or runs a long script. redis-py has
# classes for some.
_REFUSES_ALL = (redis.exceptions.OutOfMemoryError, redis.exceptions.ReadOnlyError)
_REFUSES_ALL_WORD = ("MISCONF ", "NOREPLICAS ", "BUSY ")


@dataclass(frozen=True)
class OutgoingReplies:
    replies: tuple[envelope.Reply, ...] = ()  # to one command; empty for a notice
    entry: bytes | None = None  # ID of the command's stream entry, which is removed with the final reply
    remember: CommandRecord | None = None  # outcome to store
    forget: bool = False  # The command expired: its record is deleted
    notice: Notice | None = None

    @property
    def subject(self) -> str:
        return f"the notice {self.notice.kind}" if self.notice is not None else f"the reply to {self.command_id}"

    @property
    def command_id(self) -> str:
        return self.replies[0].command_id


@dataclass(frozen=True)
class PresenceKey:
    name: str
    owner: str  # name in the log
    describe: Callable[[], Mapping[str, Any]]
    on_conflict: Callable[[Mapping[str, Any]], None]
    """Called with the presence of another live process of the same name."""
    seconds: int = 15  # until it expires
    every: float = 5.0
    """Seconds between two renewals."""


class ReplyWriter:
    """Sender of queued replies, in order, until `stop`.

    Its thread calls ``on_written`` with the replies that Redis has taken, maybe none.
    """

    def __init__(
        self,
        connection: RedisConnection,
        memory: CommandMemory,
        stream: str,
        presence: PresenceKey,
        signer: Signer | None,
        on_written: Callable[[Sequence[OutgoingReplies]], None] = lambda _: None,
    ) -> None:
        self._connection = connection
        self._memory = memory
        self._stream = stream
        self._presence = presence
        self._signer = signer
        self._on_written = on_written
        self._announced_at: datetime | None = None  # first writing of the presence
        self._queue: queue.Queue[OutgoingReplies | None] = queue.Queue(_QUEUE)  # None only wakes the thread
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainmedic-writer", daemon=True)
        self._presence_due = 0.0
        self._refusals = 0
        self._refused_since = 0.0
        self._has_seen_forgery = False
        self._log_limit = LogLimit()

    def start(self) -> None:
        self._thread.start()

    def put(self, outgoing: OutgoingReplies) -> bool:
        """Queue replies without waiting. Drop them and return False if 1,000 are queued: the server asks again."""
        if outgoing.entry is not None:
            self._connection.answered.add(outgoing.entry)
        try:
            self._queue.put_nowait(outgoing)
        except queue.Full:
            self._note_removed([outgoing])
            if self._log_limit.lets_through():
                log.error("too many replies are queued for Redis; dropping %s", outgoing.subject)
            return False
        return True

    def announce(self) -> None:
        # Renew the presence at once.
        self._presence_due = 0.0
        self._wake()

    def stop(self, timeout: float) -> None:
        """Send queued replies, delete the presence, and end, within `timeout` seconds."""
        self._stopping.set()
        self._wake()
        self._thread.join(timeout)

    def _wake(self) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def _run(self) -> None:
        unsent: list[OutgoingReplies] = []
        while True:
            try:
                unsent = unsent or self._collect()
                self._write(unsent)
                unsent = []
                if self._stopping.is_set() and self._queue.empty():
                    self._delete_presence()
                    break
            # Catch everything: Redis may answer in an unexpected shape.
            except Exception as error:
                wait = self._connection.failed(error)
                if self._stopping.is_set():
                    break
                unsent = self._give_up_on_refused(unsent, error)
                self._stopping.wait(wait)
        self._connection.close()

    def _collect(self) -> list[OutgoingReplies]:
        batches: list[OutgoingReplies | None] = []
        wait = 0.0 if self._stopping.is_set() else max(self._presence_due - time.monotonic(), 0.0)
        with contextlib.suppress(queue.Empty):
            batches.append(self._queue.get(wait > 0, wait))
            while sum(max(len(batch.replies), 1) for batch in batches if batch is not None) < _BATCH:
                batches.append(self._queue.get_nowait())
        return [batch for batch in batches if batch is not None]

    def _write(self, batches: list[OutgoingReplies]) -> None:
        is_due = time.monotonic() >= self._presence_due and not self._stopping.is_set()
        if not batches and not is_due:
            return
        if is_due:
            self._presence_due = time.monotonic() + self._presence.every
        presence = self._describe() if is_due else b""  # before the turn: querying GPUs for it may take long
        with self._connection.turn() as client:
            for batch in batches:
                if batch.forget:
                    self._memory.unmark(client, batch.command_id)
            if is_due:
                self._check_for_conflict(client)
            with client.pipeline(transaction=True) as pipeline:
                for batch in batches:
                    self._add(pipeline, batch)
                if is_due:
                    pipeline.set(self._presence.name, presence, ex=self._presence.seconds)
                    pipeline.expire(self._stream, STREAM_SECONDS)
                pipeline.execute()
        if is_due and self._announced_at is None:
            self._announced_at = envelope.utc_now()
        for batch in batches:
            if any(reply.is_final for reply in batch.replies):
                self._connection.note_command_answered(batch.command_id)
        self._note_removed(batches)
        self._refusals = 0
        self._connection.succeeded()
        self._on_written(batches)

    def _note_removed(self, batches: Sequence[OutgoingReplies]) -> None:
        for batch in batches:
            if batch.entry is not None:
                self._connection.answered.discard(batch.entry)

    def _add(self, pipeline: Any, batch: OutgoingReplies) -> None:
        if batch.remember is not None:
            entry = self._memory.entry(batch.command_id, batch.remember)
            pipeline.set(self._memory.key(batch.command_id), entry, ex=SECONDS)
        for reply in batch.replies:
            raw = reply.encode()
            if len(raw) > LARGEST_REPLY:
                raw = replace(reply, output=too_large(len(raw))).encode()
            self._append(pipeline, b"reply", raw)
        if batch.notice is not None:
            self._append(pipeline, FIELD, batch.notice.encode())
        if batch.entry is not None:
            pipeline.xack(self._stream, envelope.CONSUMER_GROUP, batch.entry)
            pipeline.xdel(self._stream, batch.entry)

    def _append(self, pipeline: Any, name: bytes, raw: bytes) -> None:
        fields: dict[Any, Any] = {name: raw}
        if self._signer is not None:
            fields |= self._signer.fields(raw)
        pipeline.xadd(envelope.REPLIES, fields, maxlen=REPLIES_KEPT, approximate=True)

    def _give_up_on_refused(self, unsent: list[OutgoingReplies], error: BaseException) -> list[OutgoingReplies]:
        """Return the replies to send again, none after several refusals, so that they block no later ones."""
        self._presence_due = 0.0
        is_outage = isinstance(error, REDIS_ERRORS) and not isinstance(error, redis.ResponseError)
        if is_outage or isinstance(error, _REFUSES_ALL) or redis_text(error).startswith(_REFUSES_ALL_WORD):
            return unsent
        if self._refusals == 0:
            self._refused_since = time.monotonic()
        self._refusals += 1
        # "exhausted": a tampered entry has the last possible ID, and the server must repair the stream.
        is_lasting = "exhausted" not in str(error) or time.monotonic() - self._refused_since > _LONGEST_REFUSAL
        if self._refusals < _MOST_REFUSALS or not is_lasting:
            return unsent
        self._refusals = 0
        for batch in unsent:
            log.error("Redis repeatedly refuses %s; dropping it", batch.subject)
        self._note_removed(unsent)
        return []

    def _describe(self) -> bytes:
        at = envelope.write_time(envelope.utc_now())
        raw = json.dumps({**self._presence.describe(), "at": at}).encode()
        return raw if self._signer is None else self._signer.seal(raw, self._presence.name)

    def _check_for_conflict(self, client: redis.Redis) -> None:
        if self._announced_at is None:
            return
        present = self._read_presence(client)
        if present and present.get("instance") != self._memory.owner and self._is_later(present):
            self._presence.on_conflict(present)

    def _is_later(self, presence: Mapping[str, Any]) -> bool:
        """Return whether the presence is later than this process's first. An unsigned time always counts as later."""
        if self._signer is None or self._announced_at is None:
            return True
        try:
            return envelope.read_time(str(presence.get("at"))) > self._announced_at
        except envelope.EnvelopeError:
            return False

    def _delete_presence(self) -> None:
        with self._connection.turn() as client:
            if self._read_presence(client).get("instance") == self._memory.owner:
                client.delete(self._presence.name)

    def _read_presence(self, client: redis.Redis) -> Mapping[str, Any]:
        """Return the genuine presence in Redis, or an empty one."""
        try:
            value: Any = client.getrange(self._presence.name, 0, LARGEST_PRESENCE)
            if not value or len(value) > LARGEST_PRESENCE:
                return {}
            sealed = unseal(value)
            if self._signer is not None:
                self._signer.verify_sealed(sealed, self._presence.name)
            return read_object(sealed.raw)
        except BadSignature as error:
            self._log_forged_presence(error)
        except (ValueError, redis.ResponseError):  # another program's value, perhaps of another type
            pass
        return {}

    def _log_forged_presence(self, error: BadSignature) -> None:
        if not self._has_seen_forgery:
            self._has_seen_forgery = True
            message = "%s: a client without the signing key has written %s: it %s"
            log.warning(message, self._presence.owner, self._presence.name, error)
