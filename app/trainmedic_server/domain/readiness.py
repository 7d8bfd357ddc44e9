"""Nodes out of service."""

from __future__ import annotations

from collections.abc import Iterable

from trainmedic_server.domain.topology import Topology


def out_of_service(nodes: Iterable[str], topology: Topology) -> dict[str, str]:
    """Return the nodes out of service in Kubernetes or Slurm, with the reason.

    Unknown readiness counts as in service: nothing could start otherwise. A silent agent counts where no scheduler has
    the node.
    """
    named, silent = topology.known.name_of, topology.known.remembered.names - topology.known.agents.names
    states: dict[str, str] = {}
    for title, source in (("Slurm: ", topology.slurm), ("", topology.cluster)):
        for listed in source.nodes:
            name = named(listed.name)
            states[name] = f"{title}{listed.unavailable}" if listed.unavailable else states.get(name, "")
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
