"""What Slurm's nodes and jobs add to the topology: names of nodes, jobs on nodes and GPUs, attributes."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from trainmedic_core.target import Target
from trainmedic_server.adapters.slurm_json import jobs_of, nodes_of
from trainmedic_server.adapters.slurm_topology import pause_after, topology_of
from trainmedic_server.domain import job_lookup, places, selectors, target_resolution
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.selectors import Selection, Selector
from trainmedic_server.domain.topology import NO_SLURM, AgentTopology, JobTopology, Topology

SINCE = datetime(2026, 1, 31, tzinfo=UTC)
NODES = nodes_of(
    {
        "nodes": [
            {
                "name": f"n{number}",
                "hostname": f"gpu-{number}.site",
                "address": f"10.0.0.{number}",
                "state": state,
                "partitions": ["gpu", "debug"] if number == 1 else ["gpu"],
                "features": ["h100", "ib"],
            }
            for number, state in ((1, ["IDLE"]), (2, ["MIXED", "DRAIN"]), (3, ["DOWN"]), (4, ["FUTURE"]))
        ]
    }
)


def number(value: int) -> dict[str, object]:
    return {"set": True, "infinite": False, "number": value}


JOBS = jobs_of(
    {
        "jobs": [
            {
                "job_id": 4711,
                "job_state": ["RUNNING"],
                "nodes": "n[1-2]",
                "gres_detail": ["gpu:h100:2(IDX:0,3)", "nic:1,gpu:h100:2(IDX:1-2),gpu:a100:1(IDX:5)"],
            },
            {
                "job_id": 4714,
                "job_state": ["RUNNING"],
                "nodes": "n3",
                "gres_detail": [],
                "array_job_id": number(4712),
                "array_task_id": number(3),
            },
            {"job_id": 4720, "job_state": ["PENDING"], "nodes": "n3"},
        ]
    }
)
SLURM = topology_of(NODES, JOBS, NO_SLURM)
TOPOLOGY = Topology(slurm=SLURM)
PRESENCE = {
    "slurm": {"job_id": "4711"},
    "placement": [{"rank": rank, "node": f"gpu-{rank + 1}", "gpu": None} for rank in (0, 1)],
}


def with_sdk(**presences: object) -> Topology:
    agents = AgentTopology()
    return Topology(jobs=JobTopology.of(presences, agents), agents=agents, slurm=SLURM)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["n2", "gpu-2.site", "gpu-2", "10.0.0.2"])
def test_a_node_is_found_by_each_of_its_names(name: str) -> None:
    """NodeName, NodeHostName (also without its domain) and NodeAddr."""
    assert target_resolution.node_named_by({"node": name}, TOPOLOGY) == "n2"


def test_a_nodes_agent_names_it() -> None:
    """Commands need that name; Slurm's actions find the node by it."""
    topology = Topology(agents=AgentTopology({"gpu-2": ()}), slurm=SLURM)
    assert target_resolution.node_named_by({"node": "10.0.0.2"}, topology) == "gpu-2"
    assert topology.jobs_on_node("gpu-2").observed == {"slurm:4711"}


def test_a_name_that_several_nodes_have_is_none() -> None:
    """As with several slurmd on one machine."""
    shared = nodes_of({"nodes": [{"name": name, "hostname": "vm", "address": "127.0.0.1"} for name in ("a", "b")]})
    topology = Topology(agents=AgentTopology({"vm": ()}), slurm=topology_of(shared, (), NO_SLURM))
    assert target_resolution.node_named_by({"node": "vm"}, topology) == "vm"
    assert target_resolution.node_named_by({"node": "b"}, topology) == "b"


@pytest.mark.parametrize("name", ["vm", "VM", "127.0.0.1"])
def test_a_refusal_names_the_slurm_nodes_that_share_a_name(name: str) -> None:
    """Not that Slurm does not have it."""
    shared = nodes_of({"nodes": [{"name": name, "hostname": "vm", "address": "127.0.0.1"} for name in ("a", "b")]})
    topology = Topology(slurm=topology_of(shared, (), NO_SLURM))
    refused = target_resolution.unknown_node(Target.of_key(f"node:{name}"), topology)
    assert refused is not None
    assert refused.why.endswith("several Slurm nodes have this host name or address: a, b")


@pytest.mark.parametrize(
    ("address", "why"), [("127.0.0.1", "that several Slurm nodes have: a, b"), ("10.9.9.9", "that no known node has")]
)
def test_an_exporters_address_is_refused_with_its_reason(address: str, why: str) -> None:
    shared = nodes_of({"nodes": [{"name": name, "hostname": "vm", "address": "127.0.0.1"} for name in ("a", "b")]})
    topology = Topology(slurm=topology_of(shared, (), NO_SLURM))
    refused = target_resolution.node_named_by({"instance": f"{address}:9100"}, topology)
    assert refused == Unresolved("target_unknown", f'instance="{address}:9100" is an address {why}')


def test_an_unknown_node_is_refused_once_slurm_has_answered() -> None:
    """Not before, and not while it does not answer. Nodes that do not exist yet are unknown."""
    target = Target.of_key("node:n9")
    refused = target_resolution.unknown_node(target, TOPOLOGY)
    assert refused is not None
    assert "Slurm (3)" in refused.why
    assert target_resolution.unknown_node(Target.of_key("node:n4"), TOPOLOGY) is not None
    assert target_resolution.unknown_node(target, Topology(slurm=SLURM.unanswered(SINCE))) is None


@pytest.mark.parametrize(
    ("reference", "job"),
    [
        ("node:n1", "slurm:4711"),
        ("node:gpu-1.site", "slurm:4711"),
        ("gpu:n1/3", "slurm:4711"),
        ("gpu:n2/2", "slurm:4711"),
        ("gpu:n2/5", "slurm:4711"),
        ("gpu:n2/0", None),
        ("node:n3", "slurm:4714"),
        ("slurm:4711", "slurm:4711"),
        ("slurm:4712_3", "slurm:4714"),
        ("slurm:4712_9", "slurm:4712_9"),
    ],
)
def test_a_node_or_gpu_leads_to_the_running_job(reference: str, job: str | None) -> None:
    """A task of an array is named by its own id, as Slurm and the SDK report it."""
    found = job_lookup.resolve_job(reference, {}, TOPOLOGY)
    assert found == job if job is not None else isinstance(found, Unresolved)


def test_a_job_with_the_sdk_goes_by_its_own_name() -> None:
    """Only under that it takes commands. Of two in one allocation, none is guessed."""
    topology = with_sdk(**{"llm-1": PRESENCE})
    for reference in ("node:n1", "node:n2", "gpu:n1/0"):
        assert job_lookup.resolve_job(reference, {}, topology) == "llm-1"
    both = with_sdk(**{"llm-1": PRESENCE, "eval": {"slurm": {"job_id": "4711"}}})
    assert isinstance(job_lookup.resolve_job("node:n2", {}, both), Unresolved)


def test_the_other_names_of_a_job_are_those_of_connected_ones() -> None:
    """Not of earlier ones in its allocation; and none is its own other name. 4720 is a component of 4714."""
    topology = with_sdk(llm={"slurm": {"job_id": "4720"}}, **{"slurm:5": {"slurm": {"job_id": "5"}}})
    slurm = replace(topology.slurm, whole_by_id={"4714": "4714", "4720": "4714"})
    topology = replace(topology, slurm=slurm, slurm_ids={f"exp-{number}": "4714" for number in range(300)})
    names = {job: topology.other_names_of_job(job) for job in ("slurm:4714", "llm", "exp-1", "slurm:5", "other")}
    assert names == {
        "slurm:4714": {"llm"},
        "llm": {"slurm:4714"},
        "exp-1": {"slurm:4714"},
        "slurm:5": set(),
        "other": set(),
    }


def test_only_a_known_id_refutes_another_name() -> None:
    topology = with_sdk(llm={"slurm": {"job_id": "4711"}})
    assert topology.may_be_same_job("llm", "slurm:4711")
    assert not topology.may_be_same_job("slurm:4714", "llm")
    assert topology.may_be_same_job("slurm:4714", "gone")
    silent = replace(topology, slurm=topology.slurm.unanswered(SINCE))
    assert silent.may_be_same_job("slurm:4714", "llm"), "it may be a part of it"


@pytest.mark.parametrize("slurm_id", [None, 4711, "4711; rm", "", [], {"job_id": {}}])
def test_a_presence_with_something_else_is_no_slurm_job(slurm_id: object) -> None:
    """Anyone who can write to Redis can write presences."""
    assert with_sdk(llm={"slurm": {"job_id": slurm_id}}).jobs.names_by_slurm_id == {}
    assert with_sdk(llm={"slurm": slurm_id}).jobs.names_by_slurm_id == {}


def test_groups_select_by_partition_and_feature() -> None:
    """A node may have several of each."""

    def members(key: str) -> list[str]:
        selection = selectors.resolve(Selector.of(Target.of_key(key)), TOPOLOGY)
        assert isinstance(selection, Selection), selection
        return [member.key for member in selection.members]

    assert members("nodes:feature=h100,partition=debug") == ["node:n1"]
    assert members("nodes:feature=ib,partition=gpu") == ["node:n1", "node:n2", "node:n3"]
    none = selectors.resolve(Selector.of(Target.of_key("nodes:partition=cpu")), TOPOLOGY)
    assert isinstance(none, Unresolved)
    assert "there are debug, gpu" in none.why
    assert isinstance(
        selectors.resolve(Selector.of(Target.of_key("nodes:partition=gpu")), Topology(slurm=SLURM.unanswered(SINCE))),
        Unresolved,
    )


def test_nodes_of_a_job_and_why_they_are_unavailable() -> None:
    assert places.nodes_of(Target.of_key("job:slurm:4711"), TOPOLOGY) == {"n1", "n2"}
    assert {node.name: node.unavailable for node in SLURM.nodes} == {"n1": "", "n2": "DRAIN", "n3": "DOWN"}


def test_an_unreadable_node_list_or_gpu_list_costs_only_itself() -> None:
    """The nodes, and other jobs, stay known."""
    bad = jobs_of(
        {
            "jobs": [
                {"job_id": 1, "job_state": ["RUNNING"], "nodes": "n[", "gres_detail": ["gpu:1(IDX:0)"]},
                {"job_id": 2, "job_state": ["RUNNING"], "nodes": "n1", "gres_detail": ["gpu:1(IDX:9-1)"]},
                {"job_id": 3, "job_state": ["RUNNING"], "nodes": "n2", "gres_detail": ["gpu:1(IDX:N/A)", "x"]},
            ]
        }
    )
    found = topology_of(NODES, bad, NO_SLURM)
    assert found.jobs_by_node == {"n1": {"slurm:2"}, "n2": {"slurm:3"}}
    assert found.jobs_by_gpu == {}


@pytest.mark.parametrize(
    ("before", "last", "pause"), [(0.0, 0.1, 5), (0.1, 20.0, 5), (1.0, 2.0, 20), (20.0, 0.1, 5), (20.0, 20.0, 60)]
)
def test_slow_readings_are_rarer_and_one_outage_delays_none(before: float, last: float, pause: float) -> None:
    """So the data are at most a minute old while Slurm answers."""
    assert pause_after(before, last).total_seconds() == pause
