"""Nodes out of service."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trainmedic_server.domain.topology import Topology


def out_of_service(nodes: Iterable[str], topology: Topology, scheduled: Mapping[str, str]) -> dict[str, str]:
    """Return the nodes out of service, with the reason. `scheduled` has a scheduler's reasons, empty if in service.

    Unknown readiness counts as in service: nothing could start otherwise. A silent agent counts where no scheduler has
    the node.
    """
    named, silent = topology.known.name_of, topology.known.remembered.names - topology.known.agents.names
    states = {named(node): why for node, why in scheduled.items()}
    for listed in topology.cluster.nodes:
        name = named(listed.name)
        states[name] = listed.unavailable or states.get(name, "")
    out: dict[str, str] = {}
    for node in nodes:
        why = states.get(node)
        if why is None and node in silent:
            why = "its agent is silent"
        elif why is None and node not in topology.attributes_by_node:
            why = "it is gone"
        if why:
            out[node] = why
    return out
