"""Presences: expiring keys of connected agents, jobs and launchers. Sending a command never depends on them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from trainmedic.wire.writer import LARGEST_PRESENCE
from trainmedic_server import telemetry
from trainmedic_server.adapters.redis_connection import FAULTS, unavailable
from trainmedic_server.adapters.redis_presence_judge import PresenceJudge
from trainmedic_server.errors import BusExplained
from trainmedic_server.ports.outside import Presence

log = telemetry.logger(__name__)

MOST_LISTED = 50_000
MOST_CLAIMS = 1000  # Listed presences with claims; further ones lose theirs.
_LONGEST_NAME = 4 * 253  # Bytes of 253 characters.
_KEYS_PER_SCAN = 1000
_KEYS_PER_CALL = 128  # Few, so that no turn of the event loop takes long.
_BYTES_PER_CALL = 4 * 1024 * 1024
_USUAL_BYTES = _BYTES_PER_CALL // _KEYS_PER_CALL  # Larger presences are read again, in small batches.


class PresenceReader:
    def __init__(self, client: Redis, judge: PresenceJudge) -> None:
        self._client = client
        self._judge = judge
        self._listings: dict[str, asyncio.Task[list[Presence]]] = {}
        self._refusals: dict[str, BusExplained] = {}

    @property
    def refusal(self) -> BusExplained | None:
        return next(iter(self._refusals.values()), None)

    async def all_under(self, prefix: str) -> list[Presence]:
        """Concurrent calls share one listing. Raises BusUnavailable."""
        task = self._listings.get(prefix)
        if task is None:
            task = self._listings[prefix] = asyncio.create_task(self._list(prefix))
            task.add_done_callback(lambda _: self._listings.pop(prefix, None))
        return await asyncio.shield(task)

    async def read(self, key: str) -> Presence | None:
        value = await self.value(key)
        return self._judge.presence_of(key, value) if value else None

    async def value(self, key: str) -> bytes | None:
        """Return the raw value, cut if it is too large for a presence; None without one. Raises BusUnavailable."""
        try:
            [value] = await self._pipelined([presence_read_command(key)])
        except FAULTS as error:
            raise unavailable(error) from error
        return value or None if isinstance(value, bytes) else None

    async def _list(self, prefix: str) -> list[Presence]:
        presences: list[Presence] = []
        try:
            keys = await self._keys(prefix)
            for start in range(0, len(keys), _KEYS_PER_CALL):
                chunk = keys[start : start + _KEYS_PER_CALL]
                values = await self._pipelined([presence_read_command(key, _USUAL_BYTES) for key in chunk])
                # In a thread: foreign data may take long.
                presences += await asyncio.to_thread(self._presences_in, chunk, values)
                presences += await self._read_large(
                    [key for key, value in zip(chunk, values, strict=True) if _is_cut(value)]
                )
        except FAULTS as error:
            translated = unavailable(error)
            if isinstance(error, ResponseError) and isinstance(translated, BusExplained):
                self._refusals[prefix] = translated
            raise translated from error
        self._refusals.pop(prefix, None)
        return _with_few_claims(presences)

    async def _read_large(self, keys: Sequence[bytes]) -> list[Presence]:
        presences: list[Presence] = []
        sizes = await self._pipelined([("STRLEN", key) for key in keys]) if keys else []
        for batch in _batches(keys, sizes):
            values = await self._pipelined([presence_read_command(key) for key in batch])
            presences += await asyncio.to_thread(self._presences_in, batch, values, LARGEST_PRESENCE)
        return presences

    def _presences_in(self, keys: Sequence[bytes], values: Sequence[Any], most: int = _USUAL_BYTES) -> list[Presence]:
        return [
            self._judge.presence_of(key.decode(errors="replace"), value)
            for key, value in zip(keys, values, strict=True)
            if isinstance(value, bytes) and value and not _is_cut(value, most)
        ]

    async def _keys(self, prefix: str) -> list[bytes]:
        keys: set[bytes] = set()  # A scan may return a key twice.
        async for key in self._client.scan_iter(match=f"{prefix}*", count=_KEYS_PER_SCAN):
            if len(key) <= len(prefix) + _LONGEST_NAME:
                keys.add(key)
            if len(keys) >= MOST_LISTED:
                log.warning("too many presences; skipping the others", prefix=prefix, listed=MOST_LISTED)
                break
        return sorted(keys)

    async def _pipelined(self, commands: Sequence[tuple[str | bytes | int, ...]]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return list(await pipeline.execute(raise_on_error=False))


def _with_few_claims(presences: Sequence[Presence]) -> list[Presence]:
    doubtful = [presence for presence in presences if presence.claims]
    too_many = {id(presence) for presence in doubtful[MOST_CLAIMS:]}
    return [replace(presence, claims={}) if id(presence) in too_many else presence for presence in presences]


def presence_read_command(key: str | bytes, most: int = LARGEST_PRESENCE) -> tuple[str | bytes | int, ...]:
    return "GETRANGE", key, 0, most  # One byte more than `most`, which shows that the value is longer.


def _is_cut(value: Any, most: int = _USUAL_BYTES) -> bool:
    """Return whether the value must be read again. One that is too large for a presence stays cut."""
    return isinstance(value, bytes) and len(value) > most and most < LARGEST_PRESENCE


def _batches(keys: Sequence[bytes], sizes: Sequence[Any]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    total = 0
    for key, size in zip(keys, sizes, strict=True):
        if not isinstance(size, int):
            continue
        if batch and total + size > _BYTES_PER_CALL:
            yield batch
            batch, total = [], 0
        batch.append(key)
        total += min(size, LARGEST_PRESENCE)
    if batch:
        yield batch
