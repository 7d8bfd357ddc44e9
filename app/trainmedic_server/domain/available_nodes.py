"""Nodes that must stay available (``guards.min_available``).

Slurm's and Kubernetes' data lag, so nodes that runs may take count too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set

from msgspec import Struct

from trainmedic_server.domain.shares import Percentage
from trainmedic_server.domain.topology import WHOLE, Pool, Topology

_SHOWN = 4
_HAS_RUN = "acted on"


class _Place(Struct, frozen=True):
    node: str
    title: str
    pool: Pool
    taken: Set[str]


def shortage(node: str, minimum: float, topology: Topology, taken: Set[str]) -> str | None:
    """Return why the node must stay in service. None if it need not, or is out of service already."""
    places = list(_places(node, topology, taken))
    if not places:
        return f"min_available: neither Slurm nor Kubernetes lists node {node}, so its capacity is unknown"
    return next((why for place in places if (why := _short(place, minimum)) is not None), None)


def _short(place: _Place, minimum: float) -> str | None:
    pool = place.pool
    if place.node in pool.unavailable:
        return None
    out = {**dict.fromkeys(place.taken & pool.nodes - {place.node}, _HAS_RUN), **pool.unavailable}
    total = len(pool.nodes)
    left = total - len(out) - 1
    least = math.ceil(round(minimum * total / 100, 9)) if isinstance(minimum, Percentage) else int(minimum)
    if left >= least:
        return None
    return (
        f"min_available: without it, {left} of {total} nodes of {place.title} would be available, and at least "
        f"{least} must be{_listed(out)}"
    )


def _listed(out: Mapping[str, str]) -> str:
    if not out:
        return ""
    shown = ", ".join(f"{node} ({why})" for node, why in sorted(out.items())[:_SHOWN])
    return f"; unavailable: {shown}{f' and {len(out) - _SHOWN} more' if len(out) > _SHOWN else ''}"


def _places(node: str, topology: Topology, taken: Set[str]) -> Iterator[_Place]:
    for title, source in (("the Kubernetes cluster", topology.cluster), ("Slurm", topology.slurm)):
        if not source.nodes:
            continue
        name = topology.listed_as(node, source.names)
        listed = {topology.listed_as(each, source.names) for each in taken}
        for pool_name, pool in source.pools.items():
            if name in pool.nodes:
                yield _Place(name, title if pool_name == WHOLE else f"partition {pool_name}", pool, listed)
    if not (topology.cluster.nodes or topology.slurm.nodes) and node in topology.nodes:
        yield _Place(node, "the cluster", Pool(frozenset(topology.nodes), {}), taken)
