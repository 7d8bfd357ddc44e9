"""Nodes and running jobs of Slurm, read periodically. After a failure the last ones remain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from msgspec.structs import replace

from trainmedic_server import telemetry
from trainmedic_server.domain import host_lists
from trainmedic_server.domain.topology import SLURM, ClusterNode, SlurmTopology
from trainmedic_server.domain.withheld import Withheld
from trainmedic_server.engine import loops
from trainmedic_server.ports.outside import Clock
from trainmedic_server.ports.slurm import FUTURE, Slurm, SlurmJob, SlurmNode

REFRESH_EVERY = timedelta(seconds=5)
_PATIENCE = timedelta(seconds=10)  # least time after which a reading is overdue
_SHARE = 0.05  # Share of slurmctld's time for readings, within `_LONGEST_PAUSE`
_LONGEST_PAUSE = timedelta(minutes=1)

log = telemetry.logger(__name__)


class SlurmWatch:
    """Run `watch` in the background; `topology` is safe in any thread."""

    def __init__(self, slurm: Slurm, clock: Clock, metrics: telemetry.Metrics) -> None:
        self._slurm = slurm
        self._clock = clock
        self._metrics = metrics
        self._answered_at = clock.now()
        self._topology = SlurmTopology(answers=False)
        self._seen: tuple[Sequence[SlurmNode], Sequence[SlurmJob]] | None = None
        self._seconds = self._seconds_before = 0.0
        """Durations of the last two readings."""

    def topology(self) -> SlurmTopology:
        return self._topology

    async def watch(self) -> None:
        await loops.repeat(self.refresh, REFRESH_EVERY, "slurm", self._metrics, sleep=self._pause)

    async def refresh(self) -> None:
        loop, now = asyncio.get_running_loop(), self._clock.now()
        began = loop.time()
        # After this time, the last topology counts as unanswered.
        too_late = loop.call_later(max(_PATIENCE.total_seconds(), 2 * self._seconds), self._mark_unanswered)
        try:
            seen = (await self._slurm.nodes(), await self._slurm.jobs())
        except Exception:
            self._mark_unanswered()
            raise
        finally:
            too_late.cancel()
            self._seconds_before, self._seconds = self._seconds, loop.time() - began
        before, self._answered_at = self._topology, now
        if before.answers and seen == self._seen:
            return
        self._topology = await asyncio.to_thread(topology_of, *seen, before)
        self._seen = seen

    def _mark_unanswered(self) -> None:
        self._topology = self._topology.unanswered(self._answered_at)

    async def _pause(self, _: float) -> None:
        await self._clock.sleep_until(self._clock.now() + pause_after(self._seconds_before, self._seconds))


def pause_after(*seconds: float) -> timedelta:
    """Return the pause after readings of these durations. A single long one, such as an outage, does not count."""
    return max(REFRESH_EVERY, min(timedelta(seconds=min(seconds) / _SHARE), _LONGEST_PAUSE))


def topology_of(nodes: Sequence[SlurmNode], jobs: Sequence[SlurmJob], before: SlurmTopology) -> SlurmTopology:
    """Unchanged names are shared with `before`."""
    by_node: dict[str, set[str]] = {}
    by_gpu: dict[str, set[str]] = {}
    whole: dict[str, str] = {}  # ID of the whole job, by the ID of each part of it
    for job in jobs:
        job_id = job.leader or job.job_id
        whole |= dict.fromkeys((job.job_id, *job.other_ids), job_id)
        if not job.is_running:
            continue
        name = f"{SLURM}{job_id}"
        for node in _hosts(job):
            by_node.setdefault(node, set()).add(name)
        for node, indexes in job.gpus_by_node.items():
            for index in indexes:
                by_gpu.setdefault(f"{node}/{index}", set()).add(name)
    topology = SlurmTopology.of(
        tuple(_node(each) for each in nodes if FUTURE not in each.states), by_node, by_gpu, whole, before
    )
    return replace(topology, withheld=_withheld(nodes, jobs))


def _withheld(nodes: Sequence[SlurmNode], jobs: Sequence[SlurmJob]) -> Withheld:
    waiting = [job for job in jobs if job.is_held and not job.has_ended]
    held = {name: job.admin_comment for job in waiting for name in (job.job_id, *job.other_ids)}
    return Withheld(
        {node.name: node.reason for node in nodes if node.is_drained},
        {node.name: node.reservation for node in nodes if node.reservation},
        held,
    )


def _hosts(job: SlurmJob) -> Sequence[str]:
    try:
        return host_lists.expand(job.nodes, host_lists.MOST_OF_JOB)
    except host_lists.UnreadableHostList as error:
        log.warning("cannot read nodes of Slurm job", job=job.job_id, error=str(error))
        return ()


def _node(node: SlurmNode) -> ClusterNode:
    attributes = {"partition": ",".join(node.partitions), "feature": ",".join(node.features), "topology": node.topology}
    return ClusterNode(
        node.name,
        tuple(name for name in dict.fromkeys((node.hostname, node.address)) if name),
        {name: value for name, value in attributes.items() if value},
        node.why_unavailable,
        node.partitions,
    )
