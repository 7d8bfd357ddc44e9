"""Pages of connected agents and jobs, with contradictions between presences."""

from __future__ import annotations

import asyncio
import base64
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from fastapi import Query
from msgspec import Struct

from trainmedic_server.api.query_types import Names, cursor_checked
from trainmedic_server.domain import contradictions
from trainmedic_server.domain.contradictions import Contradictions
from trainmedic_server.domain.topology import AgentTopology, ranks_in
from trainmedic_server.engine.shared_presences import SharedPresences
from trainmedic_server.ports.outside import Presence

PresenceNames = Annotated[Names, Query(description="Only these names; repeatable.")]


class Listed(Struct, frozen=True):
    presences: Sequence[Presence]  # sorted by name
    against: Contradictions
    agents: AgentTopology  # against which jobs are checked too
    parts: Mapping[str, Any]
    """Input of `against`: the GPUs of each agent, or the places of each job's ranks."""
    read: Sequence[Presence]  # the list as read; the same object means no change


class Page(NamedTuple):
    presences: Sequence[Presence]
    next: str | None


class PresenceLists:
    def __init__(self, presences: SharedPresences) -> None:
        self._source = presences
        self._agents: Listed | None = None
        self._jobs: Listed | None = None
        self._turn = asyncio.Lock()  # concurrent requests share one computation

    async def agents(self) -> Listed:
        """Raises BusUnavailable."""
        read = await self._source.recent_agents()
        async with self._turn:
            if self._agents is None or self._agents.read is not read:
                self._agents = await asyncio.to_thread(_listed_agents, read, self._agents)
            return self._agents

    async def jobs(self) -> Listed:
        """Raises BusUnavailable."""
        agents, read = (await self.agents()).agents, await self._source.recent_jobs()
        async with self._turn:
            if self._jobs is None or self._jobs.read is not read or self._jobs.agents is not agents:
                self._jobs = await asyncio.to_thread(_listed_jobs, read, agents, self._jobs)
            return self._jobs


def page(listed: Sequence[Presence], limit: int, cursor: str | None, names: Collection[str] | None) -> Page:
    """Return up to `limit` presences after the cursor. Raises HttpProblem for an invalid cursor."""
    after = "" if cursor is None else _decoded(cursor)
    if names:
        wanted = set(names)
        listed = [each for each in listed if each.name in wanted]
    start = bisect_right(listed, after, key=lambda each: each.name) if cursor is not None else 0
    shown = listed[start : start + limit]
    return Page(shown, _encoded(shown[-1].name) if start + limit < len(listed) else None)


def _listed_agents(read: Sequence[Presence], before: Listed | None) -> Listed:
    parts = {agent.name: agent.details.get("gpus") for agent in read}
    if before is not None and before.parts == parts:
        agents, against = before.agents, before.against
    else:
        agents = AgentTopology.of({agent.name: agent.details for agent in read})
        against = contradictions.of_agents(agents)
    return Listed(_by_name(read), against, agents, parts, read)


def _listed_jobs(read: Sequence[Presence], agents: AgentTopology, before: Listed | None) -> Listed:
    parts = {job.name: job.details.get("placement") for job in read}
    if before is not None and before.agents is agents and before.parts == parts:
        against = before.against
    else:
        ranks = (rank for job in read for rank in ranks_in(job.name, job.details))
        against = contradictions.of_jobs(ranks, agents)
    return Listed(_by_name(read), against, agents, parts, read)


def _by_name(read: Sequence[Presence]) -> list[Presence]:
    return sorted(read, key=lambda each: each.name)


def _encoded(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode("utf-8", "surrogatepass")).rstrip(b"=").decode()


def _decoded(cursor: str) -> str:
    with cursor_checked():
        raw = base64.b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        return raw.decode("utf-8", "surrogatepass")
