"""The node and the GPU that labels name, where agents, a cluster and an inventory are known."""

from __future__ import annotations

import time
from typing import Any

import pytest
from msgspec.structs import replace

from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain import inventory
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.node_names import NodeNames
from trainmedic_server.domain.target_resolution import confirmed, node_reasons, placed_gpu, resolve, unknown_node
from trainmedic_server.domain.topology import AgentTopology, ClusterNode, ClusterTopology, Pod, Topology

FIRST, SECOND, TWICE = (f"GPU-0c0{n}0000-5555-4444-8888-00000000beef" for n in (1, 2, 3))


def cards(*uuids: str) -> dict[str, Any]:
    return {"gpus": [{"uuid": uuid, "index": index} for index, uuid in enumerate(uuids)]}


AGENTS = AgentTopology.of({"dgx-1": cards(FIRST, TWICE), "dgx-2": cards(SECOND, TWICE)})
PODS = [
    Pod("u1", "gpu-operator", "dcgm-exporter-aaaaa", "dgx-1", None, ("10.2.0.1",), is_per_node=True),
    Pod("u2", "gpu-operator", "dcgm-exporter-bbbbb", "dgx-2.pool.internal", None, ("10.2.0.2",), is_per_node=True),
    Pod("u3", "monitoring", "my-collector-5d4-ccccc", "dgx-1", None, ("10.2.0.3",), is_per_node=False),
    Pod("u4", "ml", "vit-0", "dgx-2.pool.internal", "vit", ("10.2.0.4",), gpus=1),
    Pod("u5", "ml", "gone-0", "dgx-1", None, ("10.2.0.5",)),
    Pod("u6", "ml", "new-0", "dgx-3", None, ("10.2.0.5",)),
    Pod("u7", "monitoring", "old-x", "dgx-3", None, ("10.2.0.2",), is_ending=True),
]
CLUSTER = ClusterTopology(
    (
        ClusterNode("dgx-1", ("10.1.0.1", "fd00::1")),
        ClusterNode("dgx-2.pool.internal", ("10.1.0.2", "dgx-2")),
        ClusterNode("dgx-3", ("10.1.0.3",)),
    ),
    {pod.uid: pod for pod in PODS},
)
ALL = Topology(agents=AGENTS, cluster=CLUSTER)
BARE = Topology(
    inventory.parse({"10.1.0.1": "dgx-1"}), agents=AGENTS, remembered=NodeNames(frozenset({"dgx-0", "dgx-1"}))
)


def named(kind: str, labels: dict[str, str], topology: Topology = ALL) -> str:
    target = resolve(TargetKind(kind), labels, topology)
    if isinstance(target, Target):
        target = unknown_node(target, topology, labels) or target
    return target.key if isinstance(target, Target) else target.reason


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"node": "dgx-2"}, "dgx-2"),
        ({"node": "dgx-2.pool.internal", "Hostname": "dgx-2"}, "dgx-2"),
        ({"node": "DGX-1", "Hostname": "dgx-1.lab.example.com"}, "dgx-1"),
        ({"instance": "dgx-1.lab.example.com:9100"}, "dgx-1"),
        ({"instance": "10.1.0.2:9100"}, "dgx-2"),
        ({"instance": "[fd00:0::1]:9100"}, "dgx-1"),
        ({"instance": "[::ffff:10.1.0.2]:9100"}, "dgx-2"),
        ({"node": "10.1.0.1", "instance": "10.1.0.1:9100"}, "dgx-1"),
        ({"Hostname": "dcgm-exporter-bbbbb", "instance": "10.2.0.2:9400"}, "dgx-2"),
        ({"instance": "10.2.0.1:9400"}, "dgx-1"),
        ({"instance": "10.2.0.2:9400"}, "dgx-2"),
        ({"exported_instance": "dgx-1:9100", "instance": "10.2.0.3:9090"}, "dgx-1"),
        ({"exported_instance": "dgx-1", "instance": "gateway:9091"}, "dgx-1"),
        ({"exported_instance": "10.2.0.2:9400", "instance": "prom:9090"}, "dgx-2"),
        ({"exported_node": "dgx-1", "instance": "10.2.0.3:8080", "job": "kube-state-metrics"}, "dgx-1"),
        ({"node": "dgx-1", "instance": "dgx-3:8080", "job": "kube-state-metrics"}, "dgx-1"),
        ({"nodes": "dgx-[1]", "instance": "dgx-3:9341"}, "dgx-1"),
        ({"UUID": SECOND, "Hostname": "dcgm-exporter-zzzzz", "instance": "10.99.0.1:9400"}, "dgx-2"),
        ({"exported_namespace": "ml", "exported_pod": "vit-0"}, "dgx-2"),
        ({"namespace": "ml", "pod": "vit-0", "job": "kube-state-metrics", "instance": "10.2.0.3:8080"}, "dgx-2"),
    ],
)
def test_every_spelling_of_a_node_comes_to_the_same(labels: dict[str, str], expected: str) -> None:
    """To the name by which commands reach it."""
    assert named("node", labels) == f"node:{expected}"


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"node": "dgx-1", "Hostname": "dgx-2"}, "target_ambiguous"),
        ({"exported_instance": "dgx-1", "instance": "dgx-2:9091", "job": "pushgateway"}, "target_ambiguous"),
        ({"exported_node": "dgx-1", "node": "dgx-2"}, "target_ambiguous"),
        ({"node": "dgx-1", "instance": "dgx-2:9100"}, "target_ambiguous"),
        ({"UUID": FIRST, "node": "dgx-2"}, "target_ambiguous"),
        ({"UUID": FIRST, "instance": "dgx-2:9835"}, "target_ambiguous"),
        ({"UUID": FIRST, "node": "box-7", "Hostname": "box-7.c.internal"}, "target_ambiguous"),
        ({"UUID": TWICE, "node": "dgx-1"}, "target_ambiguous"),
        ({"UUID": FIRST, "exported_UUID": SECOND}, "target_ambiguous"),
        ({"nodes": "dgx-[1-2]", "instance": "dgx-3:9341"}, "target_ambiguous"),
        ({"node": "dgx-1,dgx-2"}, "target_ambiguous"),
        ({"nodes": "dgx-[1-999999999]", "instance": "dgx-3:9341"}, "target_unknown"),
        ({"nodelist": "box-7", "instance": "dgx-3:9341"}, "target_unknown"),
        ({"exported_instance": "box-7", "instance": "dgx-2:9091"}, "target_unknown"),
        ({"exported_node": "box-7", "node": "dgx-2"}, "target_unknown"),
        ({"Hostname": "box-7", "node": "dgx-2"}, "target_unknown"),
        ({"node": "box-7", "instance": "dgx-2:9100"}, "target_unknown"),
        ({"instance": "box-7:9100"}, "target_unknown"),
        ({"instance": "10.2.0.3:9200"}, "target_unknown"),
        ({"instance": "10.2.0.5:9400"}, "target_unknown"),
        ({"instance": "dgx-1:9091", "job": "pushgateway"}, "target_unknown"),
        ({"instance": "dgx-1:9115", "job": "blackbox"}, "target_unknown"),
        ({"instance": "dgx-1:8080", "job": "kube-state-metrics"}, "target_unknown"),
        ({"namespace": "monitoring", "pod": "my-collector-5d4-ccccc", "instance": "10.2.0.3:80"}, "target_unknown"),
    ],
)
def test_two_nodes_or_a_stranger_are_refused(labels: dict[str, str], expected: str) -> None:
    """And never replaced by where the exporter runs."""
    assert named("node", labels) == expected


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"UUID": FIRST.removeprefix("GPU-").upper()}, f"gpu:dgx-1/{FIRST}"),
        ({"UUID": f"{FIRST}::3", "gpu": "0"}, f"gpu:dgx-1/{FIRST}"),
        ({"UUID": FIRST, "GPU_I_ID": "7"}, f"gpu:dgx-1/{FIRST}"),
        ({"UUID": f"MIG-{FIRST}/7/0"}, f"gpu:dgx-1/{FIRST}"),
        ({"UUID": "MIG-8f6a3f40-0000-5000-8000-000000000001", "node": "dgx-1"}, "target_unknown"),
        ({"UUID": "MIG-8f6a3f40-0000-5000-8000-000000000001", "gpu": "1", "node": "dgx-1"}, "gpu:dgx-1/1"),
        ({"pci_bus_id": "00000000:18:00.0", "node": "dgx-1"}, "gpu:dgx-1/00000000:18:00.0"),
        ({"gpu_uuid": "7f00-aa", "gpu_id": "1", "hostname": "dgx-2"}, "gpu:dgx-2/7f00-aa"),
        ({"gpu": "03", "gpu_id": "3", "node": "dgx-1"}, "gpu:dgx-1/03"),
        ({"pci_bus_id": "00000000:18:00.0", "bus_id": "24", "node": "dgx-1"}, "gpu:dgx-1/00000000:18:00.0"),
        ({"pci_bus_id": "00000000:18:00.0", "bus_id": "0000:19:00.0", "node": "dgx-1"}, "target_ambiguous"),
    ],
)
def test_a_gpu_is_the_card_that_its_agent_reports(labels: dict[str, str], expected: str) -> None:
    """By the agent's own spelling; a share of a card is its card, or nothing."""
    assert named("gpu", labels) == expected


def test_names_that_differ_behind_the_first_dot_are_two_nodes() -> None:
    """The short name alone is neither, unless another label says which one it is."""
    sites = Topology(agents=AgentTopology.of({"n7.east": {}, "n7.west": {}}))
    assert named("node", {"node": "n7.east"}, sites) == "node:n7.east"
    assert named("node", {"node": "n7"}, sites) == "target_ambiguous"
    assert named("node", {"node": "n7", "Hostname": "n7.west.example.com"}, sites) == "node:n7.west"
    assert named("node", {"node": "n7.north"}, sites) == "target_unknown"
    both = Topology(agents=AgentTopology.of({"n7": {}}), cluster=ClusterTopology((ClusterNode("n7.east", ()),)))
    assert named("node", {"node": "n7.east"}, both) == "node:n7"
    assert named("node", {"node": "n7.west"}, both) == "target_unknown"


def test_a_node_whose_agent_is_gone_is_known() -> None:
    """As that of NodeDown is, after a restart of the server too."""
    assert named("node", {"instance": "dgx-0:9100"}, BARE) == "node:dgx-0"
    assert named("node", {"instance": "dgx-9:9100"}, BARE) == "target_unknown"
    # The card was moved, or the node renamed: what its exporter is still called proves nothing.
    assert named("gpu", {"uuid": FIRST, "instance": "dgx-0:9835"}, BARE) == f"gpu:dgx-1/{FIRST}"
    assert named("gpu", {"uuid": FIRST, "node": "dgx-0"}, BARE) == f"gpu:dgx-1/{FIRST}"


@pytest.mark.parametrize(
    "topology",
    [
        Topology(),
        replace(BARE, agents_answer=False, agents=AgentTopology()),
        replace(ALL, cluster=ClusterTopology(answers=False)),
    ],
)
def test_where_a_source_does_not_answer_nothing_is_unknown(topology: Topology) -> None:
    """Nor where there is no source."""
    assert named("node", {"instance": "box-7:9100"}, topology) == "node:box-7"


def test_a_refusal_names_labels_and_who_knows() -> None:
    """For a person at night."""
    labels = {"Hostname": "dgx-12", "severity": "page"}
    target = resolve(TargetKind.NODE, labels, ALL)
    assert isinstance(target, Target)
    refused = unknown_node(target, ALL, labels)
    assert refused is not None
    assert refused.why == (
        'Hostname="dgx-12" is no node that is known: agents (2), cluster (3) do not have it; did you mean dgx-1?'
    )
    unmapped = resolve(TargetKind.NODE, {"exported_instance": "10.9.9.9"}, Topology())
    assert isinstance(unmapped, Unresolved)
    assert unmapped.why == 'exported_instance="10.9.9.9" is an address that no known node has'
    disagreeing = resolve(TargetKind.NODE, {"node": "dgx-1", "Hostname": "dgx-2.pool.internal"}, ALL)
    assert isinstance(disagreeing, Unresolved)
    assert disagreeing.why == (
        'the labels disagree on the node: node="dgx-1" is dgx-1 (known by an agent); '
        'Hostname="dgx-2.pool.internal" is dgx-2 (known by an agent)'
    )


def test_an_exporter_that_may_measure_others_is_refused_with_a_way_out() -> None:
    """Also while a source of nodes does not answer, when the name of its place is not known."""
    labels = {"instance": "dgx-1:8150", "job": "weka"}
    for topology in (ALL, replace(ALL, cluster=ClusterTopology(answers=False)), Topology()):
        refused = resolve(TargetKind.NODE, labels, topology)
        assert isinstance(refused, Unresolved)
        assert refused.why == (
            'instance="dgx-1:8150" is where an exporter runs (job="weka") that may measure other machines; '
            "if it measures its own, give its targets a label node"
        )
    assert named("node", labels | {"node": "dgx-1"}) == "node:dgx-1"
    elsewhere = {"instance": "dgx-1", "host": "box-7", "job": "logs"}
    disputed = resolve(TargetKind.NODE, elsewhere, ALL)
    assert isinstance(disputed, Unresolved)
    why = 'the alert may be about another machine: host="box-7"; instance="dgx-1" is only its exporter\'s place'
    assert disputed.why == why
    assert any(reason.startswith('host="box-7"') for reason in node_reasons(elsewhere, ALL))
    assert "the exporter may measure other machines, so where it runs does not count" in node_reasons(labels, ALL)
    assert disputed.reason == "target_ambiguous"


def test_agents_that_are_there_are_not_counted_as_gone() -> None:
    assert BARE.known.counts() == "agents (2), inventory (1), agents that are gone (1)"


def test_why_a_node_is_meant_is_told_label_by_label() -> None:
    """As ``explain`` shows it."""
    reasons = node_reasons({"UUID": FIRST, "Hostname": "dcgm-exporter-aaaaa", "instance": "10.2.0.1:9400"}, ALL)
    assert reasons[0] == f'UUID="{FIRST}" is a GPU of dgx-1 (reported by its agent)'
    assert 'instance="10.2.0.1:9400" is pod gpu-operator/dcgm-exporter-aaaaa on dgx-1 (known by the cluster)' in reasons


def test_what_a_person_or_a_playbook_writes_is_held_against_the_same() -> None:
    assert confirmed(Target(TargetKind.NODE, node="dgx-2.pool.internal"), ALL) == Target(TargetKind.NODE, node="dgx-2")
    unknown = confirmed(Target(TargetKind.GPU, node="box-7", gpu="0"), ALL)
    assert isinstance(unknown, Unresolved)
    assert placed_gpu("dgx-1", FIRST.lower(), ALL) == Target(TargetKind.GPU, node="dgx-1", gpu=FIRST)
    assert isinstance(placed_gpu("dgx-2", FIRST, ALL), Unresolved)
    assert placed_gpu("dgx-2", "0", ALL) == Target(TargetKind.GPU, node="dgx-2", gpu="0")


@pytest.mark.parametrize("text", ["dcgm" * 16_000, "n[1-9]," * 9_000, "a." * 30_000, "[" * 60_000, "x-" * 30_000])
def test_no_label_takes_long(text: str) -> None:
    """Whoever writes labels writes anything."""
    began = time.process_time()
    for label in ("node", "Hostname", "exported_instance", "instance", "nodes", "UUID", "pod"):
        named("gpu", {label: text, "gpu": "0"})
        assert len(" ".join(node_reasons({label: text}, ALL))) < 2000
    assert time.process_time() - began < 2
