"""Which target an alert's labels name, for the labels that exporters and Prometheus really give."""

from __future__ import annotations

import pytest

from trainmedic_core.target import LONGEST_NAME, Target, TargetKind
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.inventory import parse
from trainmedic_server.domain.target_resolution import bounded, resolve
from trainmedic_server.domain.topology import Topology

INVENTORY = Topology(parse({"10.0.0.5": "node-5", "fd00::5": "node-5"}))


def named(kind: str, labels: dict[str, str]) -> str:
    found = resolve(TargetKind(kind), labels, INVENTORY)
    return found.key if isinstance(found, Target) else found.reason


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"UUID": "GPU-1", "gpu": "0", "Hostname": "n1"}, "gpu:n1/GPU-1"),
        ({"uuid": "GPU-1", "instance": "n1:9835"}, "gpu:n1/GPU-1"),
        ({"gpu_uuid": "GPU-1", "node": "n1"}, "gpu:n1/GPU-1"),
        ({"gpu": "3", "kubernetes_node": "n1"}, "gpu:n1/3"),
        ({"gpu_id": "3", "gpu_name": "H100", "instance": "n1:9445"}, "gpu:n1/3"),
        ({"gpu": "3", "instance": "10.0.0.5:9400"}, "gpu:node-5/3"),
        ({"gpu": "3", "instance": "[fd00::5]:9400"}, "gpu:node-5/3"),
        ({"exported_gpu": "3", "exported_node": "n1"}, "gpu:n1/3"),
    ],
)
def test_a_gpu_is_named_by_its_uuid_or_by_its_index_and_node(labels: dict[str, str], expected: str) -> None:
    """As dcgm-exporter, nvidia_gpu_exporter and Trainmedic's own exporter write it."""
    assert named("gpu", labels) == expected


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"node": "n1"}, "target_unknown"),
        ({"gpu": "3"}, "target_unknown"),
        ({"gpu": "", "node": "n1"}, "target_unknown"),
        ({"gpu": "3", "instance": "10.9.9.9:9400"}, "target_unknown"),
        ({"gpu": "3", "instance": "localhost:9445"}, "target_unknown"),
        ({"gpu": "3", "instance": "[::1]:9445"}, "target_unknown"),
        ({"gpu": "3", "gpu_id": "4", "node": "n1"}, "target_ambiguous"),
        ({"UUID": "GPU-1", "exported_UUID": "GPU-2", "node": "n1"}, "target_ambiguous"),
        ({"gpu": "3", "node": "n1", "Hostname": "n2"}, "target_ambiguous"),
        ({"gpu": "3", "node": "n1", "exported_node": "n2"}, "target_ambiguous"),
    ],
)
def test_a_gpu_that_is_not_named_clearly_is_refused(labels: dict[str, str], expected: str) -> None:
    """An alert without a GPU id does not act on GPU 0, nor one without a node on this machine."""
    assert named("gpu", labels) == expected


@pytest.mark.parametrize(
    "instance",
    [
        "http://n1:9100/metrics",
        "https://example.com/x",
        "/dev/sda",
        "10.0.0.9:9100",
        "0.0.0.0:9100",
        "n1:http",
        ":9100",
    ],
)
def test_an_instance_that_is_no_host_names_no_node(instance: str) -> None:
    """What a probe or a push puts there is not cut up until something looks like a node."""
    assert named("node", {"instance": instance}) == "target_unknown"


def test_a_node_may_have_a_port_or_none_beside_it() -> None:
    """As in the instance label of node-exporter, and of a scrape that was relabelled."""
    assert named("node", {"instance": "n1.example.com:9100"}) == "node:n1.example.com"
    assert named("node", {"instance": "n1"}) == "node:n1"


def test_what_was_looked_for_is_told_in_a_line_that_can_be_read() -> None:
    """The refused alert is in the history with the labels that would have named the target."""
    found = resolve(TargetKind.NODE, {}, Topology())
    assert not isinstance(found, Target)
    assert found.why == (
        "no label names the node (looked for node, nodename, node_name, kubernetes_node, kubernetes_node_name, "
        "kubernetes_io_hostname, label_kubernetes_io_hostname, k8s_node_name, hostname, "
        "each also with exported_ before it)"
    )


@pytest.mark.parametrize(
    ("labels", "inventory", "expected"),
    [
        ({"namespace": "research", "pod": "llm-0"}, {"pod:research/llm-0": "llm"}, "llm"),
        (
            {
                "namespace": "monitoring",
                "pod": "dcgm-exporter-x",
                "exported_namespace": "research",
                "exported_pod": "llm-0",
            },
            {"pod:research/llm-0": "llm"},
            "llm",
        ),
        ({"job_name": "named", "namespace": "research", "pod": "llm-0"}, {"pod:research/llm-0": "llm"}, "named"),
    ],
)
def test_a_pods_job_is_found_where_no_label_names_it(
    labels: dict[str, str], inventory: dict[str, str], expected: str
) -> None:
    """By the inventory; a label that names the job comes first, and the exporter's own pod has none."""
    assert resolve(TargetKind.JOB, labels, Topology(parse(inventory))) == Target(TargetKind.JOB, job=expected)


def test_pods_of_several_jobs_are_refused() -> None:
    """Never guessed."""
    labels = {"namespace": "a", "pod": "x", "exported_pod": "y"}
    found = resolve(TargetKind.JOB, labels, Topology(parse({"pod:a/x": "one", "pod:a/y": "two"})))
    assert isinstance(found, Unresolved)
    assert found.reason == "target_ambiguous"


def test_a_name_that_no_database_keeps_is_no_target() -> None:
    """A long one fits no index, and PostgreSQL takes no NUL. The alert is on record with its reason."""
    assert bounded(Target(TargetKind.NODE, node="n" * LONGEST_NAME)) == Target(TargetKind.NODE, node="n" * LONGEST_NAME)
    for target in (
        Target(TargetKind.NODE, node="n" * (LONGEST_NAME + 1)),
        Target(TargetKind.GPU, node="n", gpu="é" * LONGEST_NAME),
        Target(TargetKind.JOB, job="j" * 60_000),
        Target(TargetKind.JOB, job="j\0"),
    ):
        found = bounded(target)
        assert isinstance(found, Unresolved)
        assert found.reason == "target_unknown"
        assert len(found.why) < 200
