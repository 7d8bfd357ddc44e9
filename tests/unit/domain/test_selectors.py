"""Selectors of groups, and what they select."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain import inventory, selectors
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.node_names import NodeNames
from trainmedic_server.domain.selectors import Selection, Selector
from trainmedic_server.domain.topology import (
    AgentTopology,
    ClusterNode,
    ClusterTopology,
    JobTopology,
    Topology,
)

WRITTEN = inventory.parse(
    {
        "attributes:gpu-[1-12]": "rack=r1, pool=h100",
        "attributes:gpu-[13-14]": "rack=r2, pool=h100",
        "gpus:gpu-[1-2]": "2",
        "gpus:gpu-3": "GPU-a, GPU-b",
    }
)
TOPOLOGY = Topology(WRITTEN)


def selected(written: str, topology: Topology = TOPOLOGY) -> list[str] | str:
    selection = selectors.resolve(Selector.of(Target.of_key(written)), topology)
    if isinstance(selection, Unresolved):
        return selection.why
    return [member.key for member in selection.members]


def test_nodes_by_attributes_in_natural_order() -> None:
    """All conditions must hold; one of a condition's values suffices."""
    assert selected("nodes:pool=h100,rack=r2") == ["node:gpu-13", "node:gpu-14"]
    assert len(selected("nodes:rack=r1|r2")) == 14
    assert selected("nodes:rack=r1")[:3] == ["node:gpu-1", "node:gpu-2", "node:gpu-3"]
    assert len(selected("nodes:all")) == 14


def test_nodes_by_name() -> None:
    """A host list; an unknown name is refused, not left out."""
    assert selected("nodes:name=gpu-[2-3]") == ["node:gpu-2", "node:gpu-3"]
    assert selected("nodes:name=gpu-[12-16]") == "there is no node gpu-15, gpu-16"
    assert selected("nodes:name=gpu-[1") == "the host list 'gpu-[1' has a '[' without its ']'"


def test_gpus_of_nodes() -> None:
    """Nodes whose GPUs nobody reports are named, and never guessed."""
    assert selected("gpus:name=gpu-1") == ["gpu:gpu-1/0", "gpu:gpu-1/1"]
    assert selected("gpus:name=gpu-3") == ["gpu:gpu-3/GPU-a", "gpu:gpu-3/GPU-b"]
    part = selectors.resolve(Selector.of(Target.of_key("gpus:name=gpu-[3-4]")), TOPOLOGY)
    assert isinstance(part, Selection)
    assert (len(part.members), part.left_out) == (2, ("gpu-4",))
    assert selected("gpus:rack=r2") == "gpus:rack=r2 selects nothing: no agent reports the GPUs of gpu-13, gpu-14"


def test_a_gpu_that_two_nodes_report_is_left_out() -> None:
    """Nobody knows where it is."""
    gpus = {"gpus": [{"uuid": "GPU-x"}]}
    topology = Topology(agents=AgentTopology.of({"a": gpus, "b": gpus, "c": {"gpus": [{"uuid": "GPU-y"}]}}))
    assert selected("gpus:all", topology) == ["gpu:c/GPU-y"]
    only = Topology(agents=AgentTopology.of({"a": gpus, "b": gpus}))
    assert selected("gpus:all", only) == "gpus:all selects nothing: several nodes report a/GPU-x, b/GPU-x"


def test_jobs_by_their_nodes() -> None:
    """By name, by where they run, or by the attributes there."""
    agents = AgentTopology.of({})
    jobs = JobTopology.of(
        {"llm-1": {"placement": [{"node": "gpu-1"}, {"node": "gpu-13"}]}, "llm-2": {"placement": [{"node": "gpu-14"}]}},
        agents,
    )
    topology = Topology(WRITTEN, jobs, agents)
    assert selected("jobs:all", topology) == ["job:llm-1", "job:llm-2"]
    assert selected("jobs:rack=r1", topology) == ["job:llm-1"]
    assert selected("jobs:on_nodes=gpu-[13-14]", topology) == ["job:llm-1", "job:llm-2"]
    assert selected("jobs:name=llm-2", topology) == ["job:llm-2"]
    assert selected("jobs:on_nodes=gpu-5", topology) == "jobs:on_nodes=gpu-5 selects nothing: no connected job fits"
    assert selectors.vanished(Target(TargetKind.JOB, job="llm-3"), topology) == "the job llm-3 is gone"


def test_an_empty_selection_says_what_there_is() -> None:
    """The reason names the attribute or its values."""
    assert selected("nodes:rack=r9") == "nodes:rack=r9 selects nothing: no node has rack=r9; there are r1, r2"
    assert selected("nodes:row=1") == "nodes:row=1 selects nothing: no node has the attribute 'row'"
    assert selected("nodes:all", Topology()) == "nodes:all selects nothing: no node is known"


def test_a_silent_source_makes_no_group() -> None:
    """A list that may lack members is not fixed, and a member is not taken for gone."""
    silent = Topology(WRITTEN, cluster=ClusterTopology(answers=False))
    assert "does not answer" in str(selected("nodes:all", silent))
    assert selectors.vanished(Target(TargetKind.NODE, node="gpu-99"), silent) is None


def test_the_inventory_overrides_the_cluster() -> None:
    """Attributes of one node come from both; an agent's name for it is used."""
    cluster = ClusterTopology((ClusterNode("gpu-1.site", ("10.0.0.1",), {"rack": "r7", "zone": "a"}),))
    topology = Topology(
        inventory.parse({"attributes:gpu-1": "rack=r1"}), agents=AgentTopology.of({"gpu-1": {}}), cluster=cluster
    )
    assert topology.attributes_by_node == {"gpu-1": {"rack": "r1", "zone": "a"}}


def test_a_member_does_not_vanish_by_another_name_of_its_node() -> None:
    """While its agent is silent, only the cluster lists it; and one that was listed first may get an agent."""
    cluster = ClusterTopology((ClusterNode("gpu-7.site.example", ()),))
    silent = Topology(cluster=cluster, remembered=NodeNames(frozenset({"gpu-7"})))
    connected = Topology(cluster=cluster, agents=AgentTopology.of({"gpu-7": {"gpus": [{"uuid": "GPU-a"}]}}))
    for topology in (silent, connected):
        for name in ("gpu-7", "gpu-7.site.example"):
            assert selectors.vanished(Target(TargetKind.NODE, node=name), topology) is None
            assert selectors.vanished(Target(TargetKind.GPU, node=name, gpu="GPU-a"), topology) is None
    assert selectors.vanished(Target(TargetKind.NODE, node="gpu-8"), connected) == "the node gpu-8 is gone"


def test_vanished_members() -> None:
    """A node that is gone, and a GPU that is no longer on its node."""
    assert selectors.vanished(Target(TargetKind.NODE, node="gpu-1"), TOPOLOGY) is None
    assert selectors.vanished(Target(TargetKind.NODE, node="x"), TOPOLOGY) == "the node x is gone"
    gone = Target(TargetKind.GPU, node="gpu-3", gpu="GPU-z")
    assert selectors.vanished(gone, TOPOLOGY) == "the GPU GPU-z is no longer on gpu-3"


@given(
    st.sampled_from(list(selectors.MEMBER_KINDS)),
    st.dictionaries(
        st.text(min_size=1, max_size=5), st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3), max_size=3
    ),
)
def test_a_selector_is_its_key(plural: str, terms: dict[str, list[str]]) -> None:
    """Any attribute and value comes back from the target key, whatever characters it has."""
    selector = selectors.of_written(plural, terms or selectors.ALL)
    assert Selector.of(selector.target) == selector


@pytest.mark.parametrize("text", ["nodes:pool", "nodes:=x", "nodes:pool=", "racks:a=b"])
def test_a_wrong_key_is_refused(text: str) -> None:
    """It names the part that is wrong."""
    with pytest.raises(ValueError, match=r"is not NAME=VALUE|is no group"):
        Selector.of(Target(TargetKind.GROUP, group=text))


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("attributes:n1", "rack", "'rack' is not NAME=VALUE"),
        ("gpus:n1", "1000", "at most 256 GPUs"),
        ("attributes:n[1", "rack=r1", "without its"),
    ],
)
def test_wrong_attributes_are_refused(key: str, value: str, why: str) -> None:
    """An inventory with a slip is not read by half."""
    with pytest.raises(ValueError, match=why):
        inventory.parse({key: value})


def test_jobs_on_a_node_are_those_that_report_it_by_any_name() -> None:
    """Refused while Redis does not answer: no job may be overlooked."""
    placed = {"llm-2": "n1.lab", "llm-10": "n1", "other": "n2"}
    details = {job: {"placement": [{"rank": 0, "node": node}]} for job, node in placed.items()}
    jobs = JobTopology.of(details, AgentTopology())
    cluster = ClusterTopology(nodes=(ClusterNode("n1.lab", ()),))
    topology = Topology(jobs=jobs, cluster=cluster)
    node = Target(TargetKind.NODE, node="n1.lab")
    found = selectors.jobs_on_node(node, topology)
    assert not isinstance(found, Unresolved)
    assert [target.job for target in found] == ["llm-2", "llm-10"]
    silent = selectors.jobs_on_node(node, Topology(jobs=jobs, cluster=cluster, agents_answer=False))
    assert isinstance(silent, Unresolved)
