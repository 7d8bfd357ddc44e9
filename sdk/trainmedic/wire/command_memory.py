"""The outcomes of commands, kept so that each command is applied at most once.

Commands arrive at least once: again after a lost connection, again after the job was killed, again because the
server asks once more. The memory is in this process, and in one expiring Redis key per command, which outlives it.
A command is entered before the training loop sees it. One that an earlier process has entered and not answered was
interrupted, and is never applied again. A command that expired before it was applied is forgotten, so that the same
one may still come in time later.

A command that is not remembered may be forgotten: Redis can come back empty, or without its last writes, and the
process be another. `CommandMemory.covers` says whether the memory is whole since before a command was issued. For that
Redis holds one more key, which says since when, and in which of its runs.

Who calls it: ``trainmedic.job.queue`` decides by it what to answer, the writer keeps the outcomes.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from datetime import datetime, timedelta
from typing import Any

import redis

from trainmedic.wire import envelope, undoing
from trainmedic.wire.command_book import LARGEST_RECORD, REVOKED, CommandRecord
from trainmedic.wire.log_limit import LogLimit
from trainmedic.wire.reading import read_object
from trainmedic.wire.signing import BadSignature, Signer, unseal

log = logging.getLogger("trainmedic")

SECONDS = 30 * 24 * 3600
"""How long Redis remembers. An undo can come as late as its alert resolves, which can take days."""
_KEPT_HERE = 10_000
_KEPT_BYTES = 2048
"""What is remembered of a larger outcome in this process is its status; the whole is in Redis."""


class CommandMemory:
    """The commands of one receiver. Only background threads call what touches Redis.

    ``signer`` signs what is kept in Redis, so that nobody else can have a command answered that was never carried out.
    """

    def __init__(self, receiver: str, owner: str, signer: Signer | None = None) -> None:
        self._signer = signer
        self._prefix = f"trainmedic:memory:{receiver}:"
        self._since_key = f"trainmedic:memory-since:{receiver}"
        self.owner = owner
        self._log_limit = LogLimit()
        self._lock = threading.Lock()
        self._records: OrderedDict[str, CommandRecord] = OrderedDict()
        # Since when every command that has come is in the records, and since when each is in Redis.
        self._whole_here_since = envelope.utc_now()
        self._whole_in_redis_since: datetime | None = None
        # Held over a round trip to Redis, so never taken by the training thread.
        self._marking = threading.Lock()

    def key(self, command_id: str) -> str:
        return self._prefix + command_id

    def entry(self, command_id: str, record: CommandRecord) -> bytes:
        """What is kept in Redis under `key`."""
        return self._sealed(self.key(command_id), record.encode(self.owner))

    def recall(self, command_id: str) -> CommandRecord | None:
        """The record of a command in this process, if any."""
        with self._lock:
            return self._records.get(command_id)

    def look_up(self, client: redis.Redis, command_id: str) -> CommandRecord | None:
        """The record of a command in this process or in Redis, if any. Raises redis-py's errors."""
        here = self.recall(command_id)
        if here is not None and not here.is_cut:
            return here
        raw = _read(client, self.key(command_id))
        stored = self._record_in(command_id, raw) if raw is not None else None
        if here is not None:
            return stored if stored is not None and stored.is_final else here
        if stored is not None and stored.is_final:
            self.remember(command_id, stored)
        elif stored is not None and stored.is_ours:
            return None  # our own mark without a memory of it: it expired here, and the mark is about to go
        return stored

    @property
    def whole_since(self) -> datetime:
        """Since when the memory is whole, as far as it was last looked."""
        with self._lock:
            return min(self._whole_here_since, self._whole_in_redis_since or self._whole_here_since)

    def covers(self, client: redis.Redis, command_id: str) -> bool:
        """Whether a command that is not remembered has certainly never come. Raises redis-py's errors."""
        return self.covers_here(command_id) or undoing.is_covered(command_id, self.mark_whole(client))

    def covers_here(self, command_id: str) -> bool:
        """The same, as far as this process knows by itself."""
        with self._lock:
            return undoing.is_covered(command_id, self._whole_here_since)

    def mark_whole(self, client: redis.Redis) -> datetime | None:
        """Since when the memory in Redis is whole, which from now on it is; None where that cannot be known.

        Called as soon as Redis is connected. A Redis that comes back after a restart, or a replica in its place, may
        lack what was written last, so it is whole only since then. Raises redis-py's errors.
        """
        try:
            info: Any = client.info()
            run = str(info["run_id"])
            is_evicting = int(info.get("evicted_keys", 0)) > 0
        except (redis.ResponseError, KeyError, TypeError, ValueError):  # this user may not ask, or it is a proxy
            return None
        if is_evicting:
            return None
        since = self._since_in(_read(client, self._since_key), run) or envelope.utc_now()
        mark = json.dumps({"since": envelope.write_time(since), "redis": run}).encode()
        client.set(self._since_key, self._sealed(self._since_key, mark), ex=SECONDS)
        oldest = envelope.utc_now() - timedelta(seconds=SECONDS)
        with self._lock:
            self._whole_in_redis_since = max(since, oldest)
            return self._whole_in_redis_since

    def claim(self, client: redis.Redis, command_id: str) -> CommandRecord | None:
        """Enter a command as ours to apply. Returns None on success, else its existing record."""
        mine = CommandRecord(envelope.ACCEPTED)
        with self._marking:
            if self._enter(client, command_id, mine):
                return None
            record = self.look_up(client, command_id)
            if record is None:
                self._enter(client, command_id, mine, replace=True)
            return record

    def take_over(self, client: redis.Redis, command_id: str) -> None:
        """Enter a command as ours to apply that an earlier process had entered."""
        with self._marking:
            self._enter(client, command_id, CommandRecord(envelope.ACCEPTED), replace=True)

    def revoke(self, client: redis.Redis, command_id: str) -> None:
        """Make sure that a command is never applied: its undo came before it was."""
        self._enter(client, command_id, REVOKED)

    def _enter(self, client: redis.Redis, command_id: str, record: CommandRecord, replace: bool = False) -> bool:
        """Enter a record in Redis and in this process; return False where Redis has one already and keeps it."""
        entry = self.entry(command_id, record)
        is_entered = bool(client.set(self.key(command_id), entry, nx=not replace, ex=SECONDS))
        if is_entered:
            self.remember(command_id, record)
        return is_entered

    def remember(self, command_id: str, record: CommandRecord) -> None:
        """Remember in this process; the writer takes a final record to Redis with its reply."""
        kept = record if len(record.encode(self.owner)) <= _KEPT_BYTES else record.cut()
        with self._lock:
            self._records[command_id] = kept
            self._records.move_to_end(command_id)
            if len(self._records) > _KEPT_HERE:
                self._records.popitem(last=False)
                self._whole_here_since = envelope.utc_now()

    def forget(self, command_id: str) -> None:
        """Forget in this process a command that expired unapplied. `unmark` deletes the mark in Redis."""
        with self._lock:
            self._records.pop(command_id, None)

    def unmark(self, client: redis.Redis, command_id: str) -> None:
        """Delete the mark in Redis, unless the same command has been entered again in between."""
        with self._marking:
            if self.recall(command_id) is None:
                client.delete(self.key(command_id))

    def _sealed(self, key: str, raw: bytes) -> bytes:
        return raw if self._signer is None else self._signer.seal(raw, key)

    def _opened(self, key: str, value: bytes) -> bytes:
        """What was sealed for `key` in `value`. Raises BadSignature."""
        sealed = unseal(value)
        if self._signer is not None:
            self._signer.verify_sealed(sealed, key)
        return sealed.raw

    def _record_in(self, command_id: str, value: bytes) -> CommandRecord:
        try:
            raw = self._opened(self.key(command_id), value)
        except BadSignature as error:
            if self._log_limit.lets_through():
                log.warning("what is kept in Redis of the command %s is not genuine: it %s", command_id, error)
            return CommandRecord(envelope.ACCEPTED, is_ours=False, is_forged=True)
        return CommandRecord.decode(raw, self.owner)

    def _since_in(self, value: Any, run: str) -> datetime | None:
        """Since when the memory in this run of Redis is whole; None where that is not kept, or of another run."""
        if value is None:
            return None
        try:
            mark = read_object(self._opened(self._since_key, value))
            return envelope.read_time(mark["since"]) if mark["redis"] == run else None
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def _read(client: redis.Redis, key: str) -> bytes | None:
    """What is under a key, within bounds; None if nothing is. What is no text, somebody else has put there."""
    try:
        value: Any = client.getrange(key, 0, 2 * LARGEST_RECORD)
    except redis.ResponseError as error:
        if "WRONGTYPE" not in str(error):
            raise
        return b"of another type"
    return value or None
