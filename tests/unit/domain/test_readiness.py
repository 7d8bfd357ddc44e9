"""Which nodes are out of service, by several sources that may not know a node."""

from __future__ import annotations

from trainmedic_server.domain import inventory, readiness
from trainmedic_server.domain.node_names import NodeNames
from trainmedic_server.domain.topology import AgentTopology, ClusterNode, ClusterTopology, SlurmTopology, Topology


def out(topology: Topology, *nodes: str) -> dict[str, str]:
    return readiness.out_of_service(nodes or sorted(topology.attributes_by_node), topology)


def test_the_cluster_and_a_scheduler_say_it() -> None:
    """Each under its own name of a node; one that is out of service in either is."""
    cluster = ClusterTopology(
        (ClusterNode("n1.hall", (), {}, "cordoned"), ClusterNode("n2", ()), ClusterNode("n3", ()))
    )
    agents = AgentTopology.of({"n1": {}, "n2": {}})
    assert out(Topology(agents=agents, cluster=cluster)) == {"n1": "cordoned"}
    slurm = SlurmTopology((ClusterNode("n2", (), {}, "DRAIN"), ClusterNode("n3", ())))
    assert out(Topology(agents=agents, cluster=cluster, slurm=slurm)) == {"n1": "cordoned", "n2": "Slurm: DRAIN"}


def test_a_node_whose_readiness_nobody_knows_is_in_service() -> None:
    """An inventory names it; nothing could ever start on it otherwise."""
    assert out(Topology(inventory.parse({"attributes:n[1-2]": "rack=r1"}))) == {}


def test_a_silent_agent_counts_where_no_scheduler_has_the_node() -> None:
    """Kubernetes and Slurm know better: an agent may restart while its node works."""
    written = inventory.parse({"attributes:n[1-3]": "rack=r1"})
    remembered = NodeNames(frozenset({"n1", "n2", "n3"}))
    topology = Topology(
        written,
        cluster=ClusterTopology((ClusterNode("n2", ()),)),
        slurm=SlurmTopology((ClusterNode("n3", ()),)),
        remembered=remembered,
        agents=AgentTopology.of({}),
    )
    assert out(topology) == {"n1": "its agent is silent"}


def test_a_node_that_is_gone_is_missing() -> None:
    """It was in the frozen list."""
    assert out(Topology(inventory.parse({"attributes:n1": "rack=r1"})), "n1", "n9") == {"n9": "it is gone"}
