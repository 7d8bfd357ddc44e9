"""Shared cache of presences for several loops."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

from trainmedic_server.ports.jobs import ArrivedNotice, PresenceSource
from trainmedic_server.ports.outside import Presence

FRESH_FOR = 2.0  # Seconds. Presences are written every 5 s.
_PAUSE_PER_READING = 10  # times the duration of the last reading
_LONGEST_FRESH = 4.5  # Seconds; below the loops' 5 s, so that each check gets new data
_LONG_PAUSE = 2.0  # Seconds; after a reading of 0.2 s, too long for people to wait
_RECENT = 10.0  # Seconds. The slowest loop reads this often, so people get the loops' data


class SharedReading:
    def __init__(self, read: Callable[[], Awaitable[list[Presence]]], elapsed: Callable[[], float]) -> None:
        self._read = read
        self._elapsed = elapsed
        self._reading: asyncio.Task[None] | None = None
        self._known: list[Presence] = []
        self._read_at: float | None = None
        self._pause = 0.0  # least age of the cached list before it is read again

    async def fresh(self) -> list[Presence]:
        """Return the cached list while fresh. Read errors are raised and not cached."""
        return await self._younger_than(min(max(FRESH_FOR, self._pause), _LONGEST_FRESH))

    async def recent(self) -> list[Presence]:
        """Return presences, some seconds old if reading is slow."""
        is_long = self._pause >= _LONG_PAUSE
        return await self._younger_than(_LONGEST_FRESH + _RECENT if is_long else self._pause)

    async def _younger_than(self, age: float) -> list[Presence]:
        if self._read_at is None or self._elapsed() - self._read_at >= age:
            # Concurrent callers share a reading, also its failure. Otherwise people's requests would delay the loops
            # during a Redis outage.
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read_again())
            await asyncio.shield(self._reading)
        return self._known

    async def _read_again(self) -> None:
        began = self._elapsed()
        self._known = await self._read()
        self._read_at = self._elapsed()
        self._pause = _PAUSE_PER_READING * (self._read_at - began)


class SharedPresences:
    """Presences cached for 2 s, up to 4.5 s if reading is slow."""

    # The `recent_` methods cache for 10 times the duration of a reading, or for 14.5 s after one of 0.2 s or more.

    def __init__(self, source: PresenceSource, elapsed: Callable[[], float] | None = None) -> None:
        elapsed = elapsed or asyncio.get_running_loop().time
        self._source = source
        self._jobs = SharedReading(source.jobs, elapsed)
        self._launchers = SharedReading(source.launchers, elapsed)
        self._agents = SharedReading(source.agents, elapsed)

    async def recent_jobs(self) -> list[Presence]:
        return await self._jobs.recent()

    async def recent_agents(self) -> list[Presence]:
        return await self._agents.recent()

    async def jobs(self) -> list[Presence]:
        return await self._jobs.fresh()

    async def launchers(self) -> list[Presence]:
        return await self._launchers.fresh()

    async def agents(self) -> list[Presence]:
        return await self._agents.fresh()

    def notices(self) -> Sequence[ArrivedNotice]:
        return self._source.notices()

    def discard_notices(self, entries: Collection[bytes]) -> None:
        self._source.discard_notices(entries)
