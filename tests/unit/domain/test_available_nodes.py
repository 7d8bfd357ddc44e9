"""Which nodes are unavailable, and which may be taken out of service by `guards.min_available`."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from trainmedic_server.domain import available_nodes, inventory
from trainmedic_server.domain.node_names import NodeNames
from trainmedic_server.domain.shares import Percentage
from trainmedic_server.domain.topology import (
    AgentTopology,
    ClusterNode,
    ClusterTopology,
    SlurmTopology,
    Topology,
    names_of,
)


def in_slurm(*nodes: ClusterNode) -> SlurmTopology:
    return SlurmTopology(nodes, names=names_of(nodes))


def node(name: str, unavailable: str = "", *pools: str) -> ClusterNode:
    return ClusterNode(name, (), {}, unavailable, pools or ("gpu",))


TEN = Topology(slurm=in_slurm(*(node(f"n{number}", "DRAIN" if number == 1 else "") for number in range(1, 11))))


@pytest.mark.parametrize(
    ("minimum", "taken", "is_refused"),
    [
        (8, set(), False),
        (9, set(), True),
        (Percentage(80), set(), False),
        (Percentage(81), set(), True),  # 8.1 of 10 rounds up
        (8, {"n3"}, True),
        (8, {"n2"}, False),  # itself
        (8, {"n1"}, False),  # drained already
        (0, {f"n{number}" for number in range(3, 11)}, False),
    ],
)
def test_drained_nodes_and_those_that_runs_may_take_count(minimum: float, taken: set[str], is_refused: bool) -> None:
    """The node itself counts as taken."""
    assert (available_nodes.shortage("n2", minimum, TEN, taken) is not None) == is_refused


def test_a_refusal_says_what_is_missing() -> None:
    why = available_nodes.shortage("n2", Percentage(90), TEN, {"n9"})
    assert why == (
        "min_available: without it, 7 of 10 nodes of partition gpu would be available, and at least 9 must be; "
        "unavailable: n1 (Slurm: DRAIN), n9 (acted on)"
    )


def test_a_node_that_is_out_of_service_takes_nothing() -> None:
    """Whatever the minimum is."""
    assert available_nodes.shortage("n1", Percentage(100), TEN, set()) is None


def test_each_partition_of_the_node_counts_alone() -> None:
    """One that is too small refuses."""
    slurm = in_slurm(node("a1", "", "big", "debug"), *(node(f"a{n}", "", "big") for n in range(2, 9)))
    topology = Topology(slurm=slurm)
    assert available_nodes.shortage("a2", 7, topology, set()) is None
    why = available_nodes.shortage("a1", Percentage(50), topology, set())
    assert why is not None
    assert "partition debug" in why


def test_kubernetes_and_slurm_both_count_under_the_agents_name() -> None:
    """An alert names the node as its agent does."""
    cluster = ClusterTopology((ClusterNode("ip-1", ("gpu-1",)), ClusterNode("ip-2", (), {}, "cordoned")))
    slurm_node = ClusterNode("n1", ("gpu-1", "10.0.0.1"), {}, "", ("gpu",))
    agents = AgentTopology({"gpu-1": ()})
    for topology in (Topology(agents=agents, cluster=cluster), Topology(agents=agents, slurm=in_slurm(slurm_node))):
        assert available_nodes.shortage("gpu-1", 0, topology, set()) is None
        assert available_nodes.shortage("gpu-1", 1, topology, set()) is not None


def test_without_both_all_known_nodes_are_available_and_an_unknown_one_is_refused() -> None:
    """Runs still count."""
    topology = Topology(inventory.parse({"attributes:m[1-3]": "rack=r1"}))
    assert available_nodes.shortage("m1", 2, topology, set()) is None
    assert available_nodes.shortage("m1", 2, topology, {"m2"}) is not None
    why = available_nodes.shortage("x", 0, TEN, set())
    assert why is not None
    assert "its capacity is unknown" in why


SINCE = datetime(2026, 1, 31, 3, 12, tzinfo=UTC)
UNKNOWN = "the state of the nodes is not known since 2026-01-31T03:12:00Z: Slurm does not answer"


def test_outdated_data_counts_as_unknown() -> None:
    """Whatever the last reading said, also if there was none; one of two sources is enough."""
    of_ten = Topology(slurm=TEN.slurm.unanswered(SINCE))
    never = Topology(inventory.parse({"attributes:n2": "rack=r1"}), slurm=SlurmTopology().unanswered(SINCE))
    both = Topology(slurm=TEN.slurm.unanswered(SINCE), cluster=ClusterTopology((ClusterNode("n2", ()),)))
    for topology in (of_ten, never, both):
        assert available_nodes.shortage("n2", 0, topology, set()) == f"min_available: {UNKNOWN}"


def test_without_schedulers_the_agents_must_answer() -> None:
    topology = Topology(inventory.parse({"attributes:n2": "rack=r1"}), agents_answer=False)
    assert available_nodes.why_unknown(topology) == "the state of the nodes is not known: Redis does not answer"
    assert available_nodes.why_unknown(Topology(slurm=TEN.slurm, agents_answer=False)) is None


def out(topology: Topology, *nodes: str) -> dict[str, str]:
    pool = topology.pool("", nodes or sorted(topology.attributes_by_node))
    return available_nodes.unavailable(pool, set())


def test_both_schedulers_say_it() -> None:
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
