"""Nodes and pods on which a job runs or ran, to find its logs."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from trainmedic_server.api.jobs import JobDirectory
from trainmedic_server.domain.topology import AgentTopology, ClusterTopology
from trainmedic_server.errors import BusUnavailable
from trainmedic_server.ports.outside import CommandBus
from trainmedic_server.ports.store import RunStore

MOST_NODES = 2000  # that a search may ask


class JobNodes(Struct, frozen=True):
    nodes: tuple[str, ...] = ()
    pods: tuple[str, ...] = ()  # As ``namespace/name``.
    is_whole: bool = True
    """False if Redis did not respond, so that the job's own report is missing."""
    readers: tuple[str, ...] = ()  # All nodes whose agents read logs, for a job whose nodes are unknown.


class JobLocations:
    def __init__(
        self, bus: CommandBus, store: RunStore, cluster_topology: Callable[[], ClusterTopology] = ClusterTopology
    ) -> None:
        self._bus = bus
        self._store = store
        self._cluster_topology = cluster_topology

    async def of(self, job: str) -> JobNodes:
        """Return the nodes and pods from the cluster, the job's presence and stored places. Raises StoreUnavailable."""
        cluster = self._cluster_topology()
        nodes: list[str] = []
        pods = [(pod.namespace, pod.name) for pod in cluster.pods_by_job.get(job, ())]
        nodes += [pod.node for pod in cluster.pods_by_job.get(job, ())]
        readers: list[str] = []
        is_whole = True
        agents = AgentTopology()
        try:
            presence = next((each for each in await self._bus.jobs() if each.name == job), None)
            present = {agent.name: agent.details for agent in await self._bus.agents()}
            readers = sorted(name for name, details in present.items() if details.get("logs"))
            agents = AgentTopology.of(present)
            if presence is not None:
                members = {"name": job, "last_seen": presence.last_seen, "details": {}}
                view = JobDirectory(agents, cluster).connected(presence, members)
                nodes += view.nodes or ()
                pods += [(pod.namespace, pod.name) for pod in view.pods or ()]
        except BusUnavailable:
            is_whole = False
        seen = await self._store.transact(lambda tx: dict(tx.findings.job_places()))
        # The most recent earlier places first, for the limit.
        before = sorted((at, place.node) for place, at in seen.items() if place.job == job)
        nodes += [node for _, node in reversed(before)]
        names = tuple(dict.fromkeys(map("/".join, pods)))
        asked = dict.fromkeys(map(agents.name_of, nodes))  # an agent that is present answers only to its own name
        return JobNodes(tuple(asked)[:MOST_NODES], names, is_whole, tuple(readers[:MOST_NODES]))
