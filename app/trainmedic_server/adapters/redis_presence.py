"""Who is connected: the expiring keys by which agents and jobs say so.

The receivers write their presence themselves. It says which ranks must answer, and what to show to a person;
whether a command is sent never depends on it.
"""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from typing import Any

from redis.asyncio import Redis

from trainmedic.wire import envelope
from trainmedic_server.adapters.redis_connection import FAULTS, unavailable
from trainmedic_server.ports.outside import Clock, Presence

_KEYS_PER_CALL = 1000
LARGEST_PRESENCE = 1024 * 1024
"""Bytes. The placement of a job with 8,192 ranks takes some 800 KB."""


class PresenceReader:
    """Reads presences, one by its key or all under a prefix."""

    def __init__(self, client: Redis, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._listings: dict[str, asyncio.Task[list[Presence]]] = {}

    async def all_under(self, prefix: str) -> list[Presence]:
        """Return all connected agents, or all connected jobs, by the key prefix. Raises BusUnavailable.

        Calls that come while a listing is under way share it: when a storm of commands meets a dead cluster, all of
        them ask at the same moment.
        """
        task = self._listings.get(prefix)
        if task is None:
            task = self._listings[prefix] = asyncio.create_task(self._list(prefix))
            task.add_done_callback(lambda _: self._listings.pop(prefix, None))
        return await asyncio.shield(task)

    async def read(self, key: str) -> bytes | None:
        """Return the text of one presence; None if the receiver is not connected. Raises BusUnavailable."""
        try:
            value: Any = await self._client.get(key)
        except FAULTS as error:
            raise unavailable(error) from error
        return value if isinstance(value, bytes) else None

    async def _list(self, prefix: str) -> list[Presence]:
        presences: list[Presence] = []
        try:
            # A scan may give a key twice.
            keys = sorted({key async for key in self._client.scan_iter(match=f"{prefix}*", count=_KEYS_PER_CALL)})
            for start in range(0, len(keys), _KEYS_PER_CALL):
                chunk = keys[start : start + _KEYS_PER_CALL]
                for key, value in zip(chunk, await self._client.mget(chunk), strict=True):
                    if isinstance(value, bytes):
                        name = key.decode(errors="replace").removeprefix(prefix)
                        presences.append(_presence(name, value, self._clock.now()))
        except FAULTS as error:
            raise unavailable(error) from error
        return presences


def ranks_of(value: bytes | None) -> frozenset[int] | None:
    """Return the ranks that a presence says answer each command; None if it lists none."""
    ranks = (_details(value) or {}).get("ranks")
    if not isinstance(ranks, list) or not ranks:
        return None
    if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in ranks):
        return None
    return frozenset(ranks)


def _presence(name: str, value: bytes, now: datetime) -> Presence:
    """An existing key counts as present whatever its value; a missing ``at`` is read as now."""
    details = _details(value) or {}
    try:
        last_seen = envelope.read_time(str(details.get("at")))
    except envelope.EnvelopeError:
        last_seen = now
    return Presence(name=name, last_seen=last_seen, details=details)


def _details(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, bytes) or len(value) > LARGEST_PRESENCE:
        return None
    try:
        details = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return details if isinstance(details, dict) else None
