"""The topology, kept up to date for the resolution of targets.

A delivery never waits for Redis: it sees jobs and agents as they were a few seconds ago. Presences that could not be
read for a minute are forgotten, because a target is refused rather than guessed. Until they are read again, no node
counts as unknown. Nothing is read while no playbook needs it.

Caller: ``wiring``, which runs `watch` in addition to the engine and passes `topology` to the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from trainmedic_server import telemetry
from trainmedic_server.domain.node_names import NodeNames
from trainmedic_server.domain.topology import (
    AgentTopology,
    ClusterTopology,
    JobTopology,
    Topology,
    WrittenTopology,
)
from trainmedic_server.engine import loops
from trainmedic_server.engine.job_verdicts import JobVerdicts
from trainmedic_server.engine.node_watch import PresenceSource
from trainmedic_server.engine.shared_presences import SharedPresences
from trainmedic_server.errors import BusUnavailable
from trainmedic_server.ports.outside import Clock, Presence

REFRESH_EVERY = timedelta(seconds=5)
"""As often as a job writes its presence."""
FORGET_AFTER = timedelta(minutes=1)
RENEW_EVERY = timedelta(milliseconds=200)
"""Shortest time between two readings that alerts on unknown targets cause. `SharedPresences` makes it longer where
reading takes long."""
RENEW_AFTER_FAILURE = timedelta(seconds=30)
"""The same after one that failed or took too long: deliveries must not wait for a Redis that does not answer."""
LONGEST_RENEWAL = 0.5
"""Seconds that a delivery waits for such a reading."""
_NOTHING = (JobTopology(), AgentTopology())

log = telemetry.logger(__name__)


class TopologyWatch:
    """`is_needed` returns whether any playbook works on what presences report. `cluster` returns the known state of a
    cluster."""

    def __init__(
        self,
        presences: PresenceSource,
        clock: Clock,
        metrics: telemetry.Metrics,
        is_needed: Callable[[], bool],
        written: WrittenTopology,
        cluster: Callable[[], ClusterTopology],
    ) -> None:
        self.presences = presences
        """For others that read them as well."""
        self._clock = clock
        self._metrics = metrics
        self._is_needed = is_needed
        self._written = written
        self._cluster = cluster
        self.verdicts = JobVerdicts(clock)
        """Who began the failures of jobs; ``job_diagnoses`` puts it in."""
        self.remembered: Callable[[], NodeNames] = NodeNames
        """Nodes whose agents were connected within the retention. ``agent_watch`` sets it."""
        self._known = _NOTHING
        """Both as of one moment, replaced together: who asks may be the run store's thread."""
        self._presences: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
        self._as_of: datetime | None = None
        self._renew_from: datetime | None = None
        """Before this moment `renew` reads nothing; None until it was first called."""

    def topology(self) -> Topology:
        """The topology as it was last read."""
        jobs, agents = self._known
        return Topology(
            self._written,
            jobs,
            agents,
            self._cluster(),
            self.verdicts.current(),
            self.remembered(),
            agents_answer=self._as_of is not None,
        )

    async def watch(self) -> None:
        """Keep the topology up to date until cancelled."""
        rest = loops.by_clock(self._clock)
        await loops.repeat(self._refresh_or_forget, REFRESH_EVERY, "whereabouts", self._metrics, rest=rest)

    async def _refresh_or_forget(self) -> None:
        try:
            await self.refresh()
        except BusUnavailable:
            if self._as_of is not None and self._clock.now() - self._as_of > FORGET_AFTER:
                log.warning("the nodes of jobs are unknown while Redis is unreachable")
                self._forget()
            raise

    async def renew(self) -> None:
        """Read the presences again, because an alert names a target that is not known: its node or job may have
        connected since the last reading. A delivery waits for this, so it is rare and short."""
        now = self._clock.now()
        if self._as_of is None or (self._renew_from is not None and now < self._renew_from):
            return
        self._renew_from = now + RENEW_EVERY
        try:
            async with asyncio.timeout(LONGEST_RENEWAL):
                await self.refresh(recent=True)
        except (BusUnavailable, TimeoutError):  # `watch` reports a Redis that does not answer
            self._renew_from = now + RENEW_AFTER_FAILURE

    async def refresh(self, *, recent: bool = False) -> None:
        """Read all presences again, if any playbook needs them; with `recent`, not those that were read for another
        loop two seconds ago. Raises BusUnavailable."""
        if not self._is_needed():
            self._forget()
            return
        source = self.presences
        if recent and isinstance(source, SharedPresences):
            jobs, listed = await asyncio.gather(source.recent_jobs(), source.recent_agents())
        else:
            jobs, listed = await asyncio.gather(source.jobs(), source.agents())
        # A presence that is not trusted, and was not a moment ago, makes no node known.
        agents = [agent for agent in listed if agent.doubt is None or agent.details]
        presences = (
            {job.name: (job.details.get("placement"), job.details.get("namespace")) for job in jobs},
            {agent.name: agent.details.get("gpus") for agent in agents},
        )
        before = self._presences
        if presences != before:
            # For a hundred thousand ranks this takes a second, which deliveries should not wait for.
            known_agents = self._known[1] if before is not None and presences[1] == before[1] else None
            self._known = await asyncio.to_thread(_read, jobs, agents, known_agents)
            self._presences = presences
        self._as_of = self._clock.now()

    def _forget(self) -> None:
        self._known, self._presences, self._as_of = _NOTHING, None, None


def _read(
    jobs: Sequence[Presence], agents: Sequence[Presence], known: AgentTopology | None
) -> tuple[JobTopology, AgentTopology]:
    """`known` is what the agents say, where that is known."""
    agent_topology = known or AgentTopology.of({agent.name: agent.details for agent in agents})
    agent_topology.prepare()
    return JobTopology.of({job.name: job.details for job in jobs}, agent_topology), agent_topology
