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
"""Of many, reading takes its time: the next one waits for so many times as long, so that it takes a small share."""
_LONGEST_FRESH = 4.5
"""Seconds; less than the loops' five, so that each look comes to something new."""
_LONG_REST = 2.0
"""Seconds: behind a reading of a fifth of a second, for which a person who asks does not wait."""
_RECENT = 10.0
"""Seconds behind its being fresh in which a reading is shown to people nevertheless: the loops' longest pause."""


class SharedReading:
    """One kind of presence, as it was read last; `elapsed` counts seconds and cannot be set."""

    def __init__(self, read: Callable[[], Awaitable[list[Presence]]], elapsed: Callable[[], float]) -> None:
        self._read = read
        self._elapsed = elapsed
        self._reading: asyncio.Task[None] | None = None
        self._known: list[Presence] = []
        self._read_at: float | None = None
        self._rest = 0.0
        """Seconds behind a reading in which another would take too large a share of the time."""

    async def fresh(self) -> list[Presence]:
        """The same list as before while it is fresh. Raises what reading does, which is not kept."""
        return await self._younger_than(min(max(FRESH_FOR, self._rest), _LONGEST_FRESH))

    async def recent(self) -> list[Presence]:
        """What is there now; where reading takes long, what was read some seconds ago, at once. Raises as `fresh`."""
        is_long = self._rest >= _LONG_REST
        return await self._younger_than(_LONGEST_FRESH + _RECENT if is_long else self._rest)

    async def _younger_than(self, age: float) -> list[Presence]:
        if self._read_at is None or self._elapsed() - self._read_at >= age:
            # Who comes while it is read takes what comes of that, also where it fails: were each to try in its turn,
            # people who ask would hold up the loops while Redis does not answer.
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read_anew())
            await asyncio.shield(self._reading)
        return self._known

    async def _read_anew(self) -> None:
        began = self._elapsed()
        self._known = await self._read()
        self._read_at = self._elapsed()
        self._rest = _FRESH_FOR_TIMES * (self._read_at - began)


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
        """For people who ask: those that are there now; of thousands, for whom nobody is to wait, as they were some
        seconds ago. Raises BusUnavailable."""
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
