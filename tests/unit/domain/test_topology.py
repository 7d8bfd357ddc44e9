"""The topology: which source answers, what is left empty, and what nonsense does to it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from trainmedic_core import gpu_names
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain import inventory, places, topology
from trainmedic_server.domain.topology import AgentTopology, ClusterNode, ClusterTopology, JobTopology, Pod, Topology

A = "GPU-aaaa0000-0000-0000-0000-000000000000"
AGENTS = AgentTopology.of({"n1": {"gpus": [{"uuid": A, "index": 0, "pods": ["u1"]}]}, "n2": {}})
CLUSTER = ClusterTopology(
    (ClusterNode("n1", ("192.0.2.1",)),),
    {
        "u1": Pod("u1", "ml", "llm-0", "n1", "llm-jobset", ("192.0.2.10",)),
        "u2": Pod("u2", "ml", "exporter", "n2", None, ("192.0.2.1",)),
    },
)


def reported(**jobs: list[dict[str, Any]]) -> JobTopology:
    return JobTopology.of({job: {"placement": ranks} for job, ranks in jobs.items()}, AGENTS)


def known(written: dict[str, str | tuple[str, ...]] | None = None) -> Topology:
    jobs = reported(llm=[{"rank": 0, "node": "n1", "gpu": A}])
    return Topology(inventory.parse(written or {}), jobs, AGENTS, CLUSTER)


def test_what_jobs_report_and_what_others_observe_stay_apart() -> None:
    """Their names for the same job differ; whoever asks weighs them."""
    assert known().jobs_on_gpu("n1/0") == ({"llm"}, {"llm-jobset"})
    assert known().jobs_on_gpu(gpu_names.key(A)) == ({"llm"}, {"llm-jobset"})
    assert known().jobs_on_node("n1") == ({"llm"}, {"llm-jobset"})


def test_what_is_written_down_goes_before_its_source_and_no_other() -> None:
    """A job that a person writes down as seen by the agent replaces that, and not what the jobs report."""
    topology = known({"gpu:n1/0": "written", "told:node:n1": ("a", "b"), "pod:ml/llm-0": "mine", "192.0.2.1": "n9"})
    assert topology.jobs_on_gpu("n1/0") == ({"llm"}, {"written"})
    assert topology.jobs_on_node("n1") == ({"a", "b"}, {"llm-jobset"})
    assert topology.jobs_of_pod("ml/llm-0") == {"mine"}
    assert (topology.node_at("192.0.2.1"), topology.node_at("192.0.2.10")) == ("n9", "n1")


def test_where_nothing_is_known_the_answer_is_empty() -> None:
    """An alert that needs it is then refused."""
    nothing = Topology()
    assert nothing.jobs_on_gpu("n1/0") == nothing.jobs_on_node("n1") == (set(), set())
    assert nothing.jobs_of_pod("ml/llm-0") == set()
    assert nothing.node_at("192.0.2.1") is None


def test_an_address_of_a_node_is_the_nodes_though_a_pod_has_it_too() -> None:
    """As a pod in its node's network does."""
    assert known().node_at("192.0.2.1") == "n1"


def test_a_node_with_several_names_written_down_has_none() -> None:
    """Nobody can tell which one is meant."""
    assert known({"10.0.0.7": ("n1", "n2")}).node_at("10.0.0.7") is None


def test_a_connected_agent_without_gpus_is_known() -> None:
    """Unlike one that is not connected."""
    assert AGENTS.gpus_by_node["n2"] == ()
    assert "n3" not in AGENTS.gpus_by_node


def test_no_more_is_taken_in_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can write to Redis cannot fill the server's memory."""
    monkeypatch.setattr(topology, "MOST_ENTRIES", 3)
    gpus = {f"n{i}": {"gpus": [{"uuid": f"{i}{n}"} for n in range(2)]} for i in range(4)}
    assert sum(map(len, AgentTopology.of(gpus).gpus_by_node.values())) == 3
    jobs = reported(llm=[{"node": f"n{i}"} for i in range(9)])
    assert len(jobs.jobs_by_node) == 3


def test_a_topology_never_changes() -> None:
    """A delivery decides on one moment's knowledge."""
    with pytest.raises(AttributeError, match="immutable"):
        known().cluster = ClusterTopology()  # type: ignore[misc]


def test_a_node_has_its_jobs_whatever_each_source_calls_it() -> None:
    """Ranks report a full name, the cluster another one, and the agent a short one."""
    agents = AgentTopology.of({"box": {"gpus": [{"uuid": A, "index": 0}]}, "other": {}})
    jobs = JobTopology.of({"llm": {"placement": [{"rank": 0, "node": "box.lab.example", "gpu": "0"}]}}, agents)
    pods = {"u1": Pod("u1", "ml", "llm-0", "box.internal", "llm-jobset")}
    topology = Topology(jobs=jobs, agents=agents, cluster=ClusterTopology((ClusterNode("box.internal", ()),), pods))
    assert topology.jobs_on_node("box") == ({"llm"}, {"llm-jobset"})
    assert topology.jobs_on_gpu(gpu_names.key(A)).reported == {"llm"}
    assert topology.jobs.nodes_by_job["llm"] == {"box"}


@pytest.mark.parametrize("rank_node", ["gpu-7", "gpu-7.site.example", "llm-0"])
def test_a_job_is_on_a_node_once_whatever_each_source_calls_it(rank_node: str) -> None:
    """Also where its ranks name their pod."""
    agents = AgentTopology.of({"gpu-7": {}})
    cluster = ClusterTopology(
        (ClusterNode("gpu-7.site.example", ()),), {"u1": Pod("u1", "ml", "llm-0", "gpu-7.site.example", "llm")}
    )
    jobs = JobTopology.of({"llm": {"placement": [{"rank": 0, "node": rank_node}]}}, agents)
    written = inventory.parse({"told:node:gpu-7.site.example": "llm"})
    view = Topology(written, jobs, agents, cluster)
    assert places.nodes_of(Target(TargetKind.JOB, job="llm"), view) == {"gpu-7"}
    ranks = [{"rank": 0, "node": rank_node}, {"rank": 1, "node": "elsewhere"}]
    with_stranger = replace(view, jobs=JobTopology.of({"llm": {"placement": ranks}}, agents))
    assert places.nodes_of(Target(TargetKind.JOB, job="llm"), with_stranger) == {"gpu-7", "elsewhere"}
