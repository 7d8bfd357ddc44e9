"""Current topology for target resolution. A delivery waits for Redis only if a target is unknown, for 0.5 s at most.

Presences not read for a minute are dropped, because unknown targets are refused, not guessed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from trainmedic_server import telemetry
from trainmedic_server.domain.node_names import NodeNames
from trainmedic_server.domain.topology import (
    NO_SLURM,
    AgentTopology,
    ClusterTopology,
    JobTopology,
    SlurmTopology,
    Topology,
    WrittenTopology,
)
from trainmedic_server.engine import loops
from trainmedic_server.engine.job_verdicts import JobVerdicts
from trainmedic_server.engine.shared_presences import SharedPresences
from trainmedic_server.errors import BusUnavailable
from trainmedic_server.ports.jobs import PresenceSource
from trainmedic_server.ports.outside import Clock, Presence

REFRESH_EVERY = timedelta(seconds=5)
FORGET_AFTER = timedelta(minutes=1)
# Minimum time between readings caused by unknown targets; longer if reading is slow (`SharedPresences`).
RENEW_EVERY = timedelta(milliseconds=200)
# Minimum time after a failed or slow reading: deliveries must not wait for a silent Redis.
RENEW_AFTER_FAILURE = timedelta(seconds=30)
_LONGEST_RENEWAL_SECONDS = 0.5  # for which a delivery waits
_NOTHING_KNOWN = (JobTopology(), AgentTopology())

log = telemetry.logger(__name__)


class TopologyWatch:
    def __init__(
        self,
        presences: PresenceSource,
        clock: Clock,
        metrics: telemetry.Metrics,
        is_needed: Callable[[], bool],
        written: WrittenTopology,
        cluster: Callable[[], ClusterTopology],
        slurm: Callable[[], SlurmTopology] = lambda: NO_SLURM,
    ) -> None:
        self.presences = presences
        self._clock = clock
        self._metrics = metrics
        self._is_needed = is_needed  # by playbooks or log rules
        self._written = written  # by the inventory file
        self._cluster = cluster
        self._slurm = slurm
        self.verdicts = JobVerdicts(clock)  # filled by diagnoses
        self.remembered: Callable[[], NodeNames] = NodeNames  # nodes of known agents, also lost ones; set by the wiring
        self.slurm_ids: Callable[[], Mapping[str, str]] = dict  # set by the wiring
        self._known = _NOTHING_KNOWN  # Replaced as a whole: the store's thread reads it
        self._presences: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None  # those that `_known` shows
        self._begun = 0  # readings
        self._shown = 0  # number of the reading that `_known` shows
        self._as_of: datetime | None = None
        self._renew_from: datetime | None = None  # `renew` does nothing earlier

    def topology(self) -> Topology:
        jobs, agents = self._known
        return Topology(
            self._written,
            jobs,
            agents,
            self._cluster(),
            self.verdicts.current(),
            self.remembered(),
            agents_answer=self._as_of is not None,
            slurm=self._slurm(),
            slurm_ids=self.slurm_ids(),
        )

    async def watch(self) -> None:
        sleep = loops.sleeping_by(self._clock)
        await loops.repeat(self._refresh_or_forget, REFRESH_EVERY, "whereabouts", self._metrics, sleep=sleep)

    async def _refresh_or_forget(self) -> None:
        try:
            await self.refresh()
        except Exception as error:  # also of an unreadable presence: an old location could be another job's by now
            if self._as_of is not None and self._clock.now() - self._as_of > FORGET_AFTER:
                why = "Redis is unreachable" if isinstance(error, BusUnavailable) else "reading them fails"
                log.warning("job locations unknown", why=why)
                self._forget()
            raise

    async def renew(self) -> None:
        """Read again for an alert's unknown target, which may have just connected."""
        now = self._clock.now()
        if self._as_of is None or (self._renew_from is not None and now < self._renew_from):
            return
        self._renew_from = now + RENEW_EVERY
        try:
            async with asyncio.timeout(_LONGEST_RENEWAL_SECONDS):
                await self.refresh(recent=True)
        except Exception:  # `watch` reports it; alerts must not wait for the end of a failure
            self._renew_from = now + RENEW_AFTER_FAILURE

    async def refresh(self, *, recent: bool = False) -> None:
        """Read all presences, if needed. `recent` skips the cache, unless reading is slow. Raises BusUnavailable."""
        if not self._is_needed():
            self._forget()
            return
        self._begun += 1
        number, source = self._begun, self.presences
        if recent and isinstance(source, SharedPresences):
            jobs, listed = await asyncio.gather(source.recent_jobs(), source.recent_agents())
        else:
            jobs, listed = await asyncio.gather(source.jobs(), source.agents())
        # Untrusted presences count only if they were trusted a moment ago.
        agents = [agent for agent in listed if agent.doubt is None or agent.details]
        presences = (  # the parts that a topology shows
            {job.name: [job.details.get(name) for name in ("placement", "namespace", "slurm")] for job in jobs},
            {agent.name: agent.details.get("gpus") for agent in agents},
        )
        before, known = self._presences, self._known
        if presences != before:
            # 100,000 ranks take 1 s, for which deliveries should not wait.
            known_agents = known[1] if before is not None and presences[1] == before[1] else None
            known = await asyncio.to_thread(_parsed, jobs, agents, known_agents)
        if number < self._shown:
            return  # a slow reading must not replace a later one
        self._known, self._presences = known, presences
        self._shown, self._as_of = number, self._clock.now()

    def _forget(self) -> None:
        self._known, self._presences, self._as_of = _NOTHING_KNOWN, None, None
        self._begun = self._shown = self._begun + 1  # readings begun before are void


def _parsed(
    jobs: Sequence[Presence], agents: Sequence[Presence], known: AgentTopology | None
) -> tuple[JobTopology, AgentTopology]:
    """`known` is the unchanged topology of the agents."""
    agent_topology = known or AgentTopology.of({agent.name: agent.details for agent in agents})
    agent_topology.prepare()
    return JobTopology.of({job.name: job.details for job in jobs}, agent_topology), agent_topology
