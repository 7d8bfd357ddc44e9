"""Pages of who is connected: in the order of their names, from what was read a moment ago.

What takes long for thousands, such as what speaks against whom, is worked out once for each reading and not for each
page. Who calls it: the routes of ``/agents`` and ``/jobs``.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from fastapi import Query

from trainmedic_server.domain import contradictions
from trainmedic_server.domain.contradictions import Contradictions
from trainmedic_server.domain.topology import AgentTopology, ranks_in
from trainmedic_server.engine.shared_presences import SharedReading
from trainmedic_server.ports.outside import CommandBus, Presence
from trainmedic_server.server.query_types import wrong_cursor

MOST_NAMES = 20
_Name = Annotated[str, Query(min_length=1, max_length=253, pattern=r"^[^\x00]*$")]
Names = Annotated[
    list[_Name] | None, Query(max_length=MOST_NAMES, description="Only those of these names; several times.")
]


@dataclass(frozen=True, slots=True)
class Listed:
    """Everybody of one kind at one moment, by name."""

    presences: Sequence[Presence]
    against: Contradictions
    agents: AgentTopology


class Page(NamedTuple):
    """A page, and the cursor of the next; None where there is none."""

    presences: Sequence[Presence]
    next: str | None


class PresenceLists:
    """What the bus says of agents and jobs, at most some seconds old."""

    def __init__(self, bus: CommandBus) -> None:
        self._read_agents = SharedReading(bus.agents, time.monotonic)
        self._read_jobs = SharedReading(bus.jobs, time.monotonic)
        self._agents: tuple[Sequence[Presence], Listed] | None = None
        self._jobs: tuple[Sequence[Presence], AgentTopology, Listed] | None = None
        self._turn = asyncio.Lock()

    async def agents(self) -> Listed:
        """Raises BusUnavailable."""
        read = await self._read_agents.fresh()
        async with self._turn:
            if self._agents is None or self._agents[0] is not read:
                self._agents = read, await asyncio.to_thread(_listed_agents, read)
            return self._agents[1]

    async def jobs(self) -> Listed:
        """Raises BusUnavailable."""
        agents, read = (await self.agents()).agents, await self._read_jobs.fresh()
        async with self._turn:
            known = self._jobs
            if known is None or known[0] is not read or known[1] is not agents:
                known = self._jobs = read, agents, await asyncio.to_thread(_listed_jobs, read, agents)
            return known[2]


def page(listed: Sequence[Presence], limit: int, cursor: str | None, names: Collection[str] | None) -> Page:
    """Up to `limit` of those listed, which are sorted by name, after the cursor. Raises HttpProblem where nobody gave
    that cursor."""
    after = "" if cursor is None else _decoded(cursor)
    if names:
        wanted = set(names)
        listed = [each for each in listed if each.name in wanted]
    start = bisect_right(listed, after, key=lambda each: each.name) if cursor is not None else 0
    shown = listed[start : start + limit]
    return Page(shown, _encoded(shown[-1].name) if start + limit < len(listed) else None)


def _listed_agents(read: Sequence[Presence]) -> Listed:
    agents = AgentTopology.of({agent.name: agent.details for agent in read})
    return Listed(sorted(read, key=lambda agent: agent.name), contradictions.of_agents(agents), agents)


def _listed_jobs(read: Sequence[Presence], agents: AgentTopology) -> Listed:
    ranks = (rank for job in read for rank in ranks_in(job.name, job.details))
    return Listed(sorted(read, key=lambda job: job.name), contradictions.of_jobs(ranks, agents), agents)


def _encoded(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode("utf-8", "surrogatepass")).rstrip(b"=").decode()


def _decoded(cursor: str) -> str:
    try:
        raw = base64.b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        return raw.decode("utf-8", "surrogatepass")
    except (ValueError, binascii.Error):
        raise wrong_cursor() from None
