"""One reader of presences for several loops: what one has read, the others take, while it is fresh.

Who calls it: ``topology_watch``, ``node_watch``, ``job_diagnoses``, ``job_watch`` and ``agent_watch``, each every five
or ten seconds from the server's start. What they are given, Redis has answered a few seconds ago at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

from trainmedic_server.engine.node_watch import PresenceSource
from trainmedic_server.ports.jobs import ArrivedNotice
from trainmedic_server.ports.outside import Presence

FRESH_FOR = 2.0
"""Seconds. Presences are written every five."""
_FRESH_FOR_TIMES = 10
"""Of many, reading takes its time: it stays fresh for so many times as long, and so takes a small share of the time."""
_LONGEST_FRESH = 4.5
"""Seconds; less than the loops' five, so that each look comes to something new."""
_IS_LONG = 0.2
"""Seconds of a reading that a person who asks does not wait for."""
_RECENT = 10.0
"""Seconds behind its being fresh in which a reading is shown to people nevertheless: the loops' longest pause."""


class SharedReading:
    """One kind of presence, as it was read last; `elapsed` counts seconds and cannot be set."""

    def __init__(self, read: Callable[[], Awaitable[list[Presence]]], elapsed: Callable[[], float]) -> None:
        self._read = read
        self._elapsed = elapsed
        self._reading: asyncio.Task[None] | None = None
        self._known: list[Presence] = []
        self._fresh_until: float | None = None
        self._took = 0.0

    async def fresh(self) -> list[Presence]:
        """The same list as before while it is fresh. Raises what reading does, which is not kept."""
        if self._fresh_until is None or self._elapsed() >= self._fresh_until:
            # Who comes while it is read takes what comes of that, also where it fails: were each to try in its turn,
            # people who ask would hold up the loops while Redis does not answer.
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read_anew())
            await asyncio.shield(self._reading)
        return self._known

    async def _read_anew(self) -> None:
        began = self._elapsed()
        self._known = await self._read()
        now = self._elapsed()
        self._took = now - began
        self._fresh_until = now + min(max(FRESH_FOR, _FRESH_FOR_TIMES * self._took), _LONGEST_FRESH)

    async def recent(self) -> list[Presence]:
        """As `fresh`; but where reading takes long, what a loop has read some seconds ago, at once. Raises the same."""
        if self._took >= _IS_LONG and self._fresh_until is not None and self._elapsed() < self._fresh_until + _RECENT:
            return self._known
        return await self.fresh()


class SharedPresences:
    """A source of presences that asks another one at most every two seconds, or less often where that takes long.

    A failure is not kept.
    """

    def __init__(self, source: PresenceSource, elapsed: Callable[[], float] | None = None) -> None:
        """`elapsed` counts seconds and cannot be set."""
        elapsed = elapsed or asyncio.get_running_loop().time
        self._source = source
        self._jobs = SharedReading(source.jobs, elapsed)
        self._launchers = SharedReading(source.launchers, elapsed)
        self._agents = SharedReading(source.agents, elapsed)

    async def recent_jobs(self) -> list[Presence]:
        """For people who ask: some seconds older than `jobs` at most, so that thousands keep nobody waiting. Raises
        BusUnavailable."""
        return await self._jobs.recent()

    async def recent_agents(self) -> list[Presence]:
        """As `recent_jobs`, of agents."""
        return await self._agents.recent()

    async def jobs(self) -> list[Presence]:
        """As of the source. Raises BusUnavailable."""
        return await self._jobs.fresh()

    async def launchers(self) -> list[Presence]:
        """As of the source. Raises BusUnavailable."""
        return await self._launchers.fresh()

    async def agents(self) -> list[Presence]:
        """As of the source. Raises BusUnavailable."""
        return await self._agents.fresh()

    def notices(self) -> Sequence[ArrivedNotice]:
        """As of the source."""
        return self._source.notices()

    def discard_notices(self, entries: Collection[bytes]) -> None:
        """As of the source."""
        self._source.discard_notices(entries)
