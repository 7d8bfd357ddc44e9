"""Nodes that take no new work, for ``guards.min_available`` and ``rollout.max_unavailable``. Pure.

Slurm's and Kubernetes' data lag, so nodes that runs work on (`at_work`) count too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set

from trainmedic_core.words import few
from trainmedic_server.domain.shares import Percentage
from trainmedic_server.domain.topology import Pool, Topology
from trainmedic_server.domain.upcoming import clock

_SHOWN = 4
HAS_RUN = "acted on"  # reason for a node that a run works on


def unavailable(pool: Pool, at_work: Set[str]) -> dict[str, str]:
    """Return the reasons by unavailable node."""
    return {**dict.fromkeys(sorted(pool.nodes & at_work), HAS_RUN), **pool.out}


def why_unknown(topology: Topology) -> str | None:
    """Return which source does not answer; None if all do. Redis counts only if no scheduler lists nodes."""
    silent = [
        (name, source.silent_since)
        for name, source in (("Slurm", topology.slurm), ("Kubernetes", topology.cluster))
        if not source.answers
    ]
    if not (silent or topology.slurm.nodes or topology.cluster.nodes or topology.agents_answer):
        silent = [("Redis", None)]
    if not silent:
        return None
    names = " and ".join(name for name, _ in silent)
    since = min((at for _, at in silent if at is not None), default=None)
    when = f" since {clock(since)}" if since is not None else ""
    return f"the state of the nodes is not known{when}: {names} {'do' if len(silent) > 1 else 'does'} not answer"


def shortage(node: str, minimum: float, topology: Topology, at_work: Set[str]) -> str | None:
    """Return why the node must stay in service; None if it need not, or is out of service already.

    `minimum` is a number of nodes, or a `Percentage` of each pool.
    """
    unknown = why_unknown(topology)
    if unknown is not None:
        return f"min_available: {unknown}"
    node, at_work = topology.known.name_of(node), set(map(topology.known.name_of, at_work))
    pools = [pool for pool in topology.pools if node in pool.nodes]
    if not pools:
        return f"min_available: neither Slurm nor Kubernetes lists node {node}, so its capacity is unknown"
    return next((why for pool in pools if (why := _shortage_of(pool, node, minimum, at_work)) is not None), None)


def _shortage_of(pool: Pool, node: str, minimum: float, at_work: Set[str]) -> str | None:
    if node in pool.out:
        return None
    out, total = unavailable(pool, at_work - {node}), len(pool.nodes)
    left = total - len(out) - 1
    least = math.ceil(round(minimum * total / 100, 9)) if isinstance(minimum, Percentage) else int(minimum)
    if left >= least:
        return None
    return (
        f"min_available: without it, {left} of {total} nodes of {pool.title} would be available, and at least "
        f"{least} must be{_listed(out)}"
    )


def _listed(out: Mapping[str, str]) -> str:
    if not out:
        return ""
    return f"; unavailable: {few([f'{node} ({why})' for node, why in sorted(out.items())], _SHOWN)}"
