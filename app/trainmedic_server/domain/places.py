from __future__ import annotations

from trainmedic_core import gpu_names
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain.topology import Topology

_NOWHERE: frozenset[str] = frozenset()


def nodes_of(target: Target, topology: Topology) -> frozenset[str]:
    """Return the target's nodes; empty for cluster and group."""
    match target.kind:
        case TargetKind.GPU | TargetKind.NODE:
            return frozenset({topology.known.name_of(target.node)}) if target.node else _NOWHERE
        case TargetKind.JOB:
            return _nodes_of_job(target.job or "", topology)
        case TargetKind.CLUSTER | TargetKind.GROUP:
            return _NOWHERE


# Callers have no topology. If only it knows a target's nodes, they must be in `Run.also` (`engine/matching`).
def counted_nodes(target: Target) -> frozenset[str]:
    """Return the nodes that a run on the target counts for the breaker and ``min_available``."""
    match target.kind:
        case TargetKind.GPU | TargetKind.NODE:
            return frozenset({target.node}) if target.node else _NOWHERE
        case TargetKind.JOB | TargetKind.CLUSTER | TargetKind.GROUP:
            return _NOWHERE


def jobs_of(target: Target, topology: Topology) -> frozenset[str]:
    """Return the jobs on a target; for a job, itself."""
    match target.kind:
        case TargetKind.JOB:
            return frozenset({target.job}) if target.job else _NOWHERE
        case TargetKind.NODE:
            return _NOWHERE.union(*topology.jobs_on_node(target.node or ""))
        case TargetKind.GPU:
            return _NOWHERE.union(*topology.jobs_on_gpu(gpu_names.key(target.gpu or "", target.node or "")))
        case TargetKind.CLUSTER | TargetKind.GROUP:
            return _NOWHERE


def gpus_of(target: Target, topology: Topology) -> int | None:
    """Return the number of GPUs; None if unknown."""
    match target.kind:
        case TargetKind.GPU:
            return 1
        case TargetKind.NODE:
            gpus = topology.agents.gpus_by_node.get(target.node or "")
            return len(gpus) if gpus is not None else None
        case TargetKind.JOB:
            return topology.jobs.gpus_by_job.get(target.job or "")
        case TargetKind.CLUSTER | TargetKind.GROUP:
            return None


def _nodes_of_job(job: str, topology: Topology) -> frozenset[str]:
    written = (topology.written.reported_by_node, topology.written.observed_by_node)
    # A node may have another name in each source. Pools and attributes are listed under the preferred one.
    listed = (
        *(pod.node for pod in topology.cluster.pods_by_job.get(job, ())),
        *topology.slurm.nodes_by_job.get(job, _NOWHERE),
        *(node for by_node in written for node, jobs in by_node.items() if job in jobs),
    )
    of_ranks = topology.jobs.nodes_by_job.get(job, _NOWHERE)
    named = topology.nodes_of_job(job) or {topology.node_named(name) or name for name in of_ranks}
    return frozenset(map(topology.known.name_of, listed)).union(named)
