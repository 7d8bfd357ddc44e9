"""Outcomes of a job's commands, here and in Redis, so that each is applied at most once.

A command is entered before the training loop sees it. One that an earlier process did not answer is not applied
again, except by `take_over`. Redis can lose records; another key states since when the memory is complete.
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

SECONDS = 30 * 24 * 3600  # expiry of records; an undo can come days later
_KEPT_HERE = 10_000  # records in this process, with outputs up to _KEPT_BYTES
_KEPT_BYTES = 2048


class CommandMemory:
    """Commands of one receiver. Methods with ``client`` wait for Redis.

    ``signer`` signs the records, against faked outcomes.
    """

    def __init__(self, receiver: str, owner: str, signer: Signer | None = None) -> None:
        self._signer = signer
        self._prefix = f"trainmedic:memory:{receiver}:"
        self._since_key = f"trainmedic:memory-since:{receiver}"
        self.owner = owner  # instance ID of this process
        self._log_limit = LogLimit()
        self._lock = threading.Lock()
        self._records: OrderedDict[str, CommandRecord] = OrderedDict()
        # Start of the complete memory in this process, and in Redis.
        self._whole_here_since = envelope.utc_now()
        self._whole_in_redis_since: datetime | None = None
        # Held during a round trip to Redis; the training thread never takes it.
        self._marking = threading.Lock()

    def key(self, command_id: str) -> str:
        return self._prefix + command_id

    def entry(self, command_id: str, record: CommandRecord) -> bytes:
        return self._sealed(self.key(command_id), record.encode(self.owner))

    def recall(self, command_id: str) -> CommandRecord | None:
        with self._lock:
            return self._records.get(command_id)

    def look_up(self, client: redis.Redis, command_id: str) -> CommandRecord | None:
        # Here, then in Redis; `recall` asks only this process.
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
            return None  # our own mark, but forgotten here: the command expired, and the mark is about to be deleted
        return stored

    @property
    def whole_since(self) -> datetime:
        # Start of the complete memory, here or in Redis.
        with self._lock:
            return min(self._whole_here_since, self._whole_in_redis_since or self._whole_here_since)

    def covers(self, client: redis.Redis, command_id: str) -> bool:
        """Return whether there would be a record of the command. Raises redis-py's errors."""
        return self.covers_here(command_id) or undoing.is_covered(command_id, self.mark_whole(client))

    def covers_here(self, command_id: str) -> bool:
        with self._lock:
            return undoing.is_covered(command_id, self._whole_here_since)

    def mark_whole(self, client: redis.Redis) -> datetime | None:
        """Return since when the memory in Redis is complete, and store it; None if unknowable.

        Call it whenever Redis connects, because it may lack the last writes. Raises redis-py's errors.
        """
        try:
            info: Any = client.info()
            run = str(info["run_id"])
            is_evicting = int(info.get("evicted_keys", 0)) > 0
        except (redis.ResponseError, KeyError, TypeError, ValueError):  # a proxy, or a user without this permission
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
        """Enter a command; return None, or its existing record."""
        mine = CommandRecord(envelope.ACCEPTED)
        with self._marking:
            if self._enter(client, command_id, mine):
                return None
            record = self.look_up(client, command_id)
            if record is None:
                self._enter(client, command_id, mine, replace=True)
            return record

    def take_over(self, client: redis.Redis, command_id: str) -> None:
        # Enter a command of an earlier process as ours.
        with self._marking:
            self._enter(client, command_id, CommandRecord(envelope.ACCEPTED), replace=True)

    def revoke(self, client: redis.Redis, command_id: str) -> None:
        # Its undo came first.
        self._enter(client, command_id, REVOKED)

    def _enter(self, client: redis.Redis, command_id: str, record: CommandRecord, replace: bool = False) -> bool:
        # False if Redis has a record, unless ``replace``.
        entry = self.entry(command_id, record)
        is_entered = bool(client.set(self.key(command_id), entry, nx=not replace, ex=SECONDS))
        if is_entered:
            self.remember(command_id, record)
        return is_entered

    def remember(self, command_id: str, record: CommandRecord) -> None:
        kept = record if len(record.encode(self.owner)) <= _KEPT_BYTES else record.cut()
        with self._lock:
            self._records[command_id] = kept
            self._records.move_to_end(command_id)
            if len(self._records) > _KEPT_HERE:
                self._records.popitem(last=False)
                self._whole_here_since = envelope.utc_now()

    def forget(self, command_id: str) -> None:
        with self._lock:
            self._records.pop(command_id, None)

    def unmark(self, client: redis.Redis, command_id: str) -> None:
        """Delete the record in Redis after `forget`."""
        with self._marking:
            if self.recall(command_id) is None:
                client.delete(self.key(command_id))

    def _sealed(self, key: str, raw: bytes) -> bytes:
        return raw if self._signer is None else self._signer.seal(raw, key)

    def _opened(self, key: str, value: bytes) -> bytes:
        sealed = unseal(value)
        if self._signer is not None:
            self._signer.verify_sealed(sealed, key)
        return sealed.raw

    def _record_in(self, command_id: str, value: bytes) -> CommandRecord:
        try:
            raw = self._opened(self.key(command_id), value)
        except BadSignature as error:
            if self._log_limit.lets_through():
                log.warning("the record of command %s in Redis is not genuine: it %s", command_id, error)
            return CommandRecord(envelope.ACCEPTED, is_ours=False, is_forged=True)
        return CommandRecord.decode(raw, self.owner)

    def _since_in(self, value: Any, run: str) -> datetime | None:
        if value is None:
            return None
        try:
            mark = read_object(self._opened(self._since_key, value))
            return envelope.read_time(mark["since"]) if mark["redis"] == run else None
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def _read(client: redis.Redis, key: str) -> bytes | None:
    try:
        value: Any = client.getrange(key, 0, 2 * LARGEST_RECORD)
    except redis.ResponseError as error:
        if "WRONGTYPE" not in str(error):
            raise
        return b"of another type"
    return value or None
