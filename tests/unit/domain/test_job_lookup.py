"""The job that uses a GPU or a node, or that a pod belongs to: who is asked in which order, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from trainmedic_core import gpu_names
from trainmedic_server.domain import inventory, job_lookup
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.topology import Topology, WrittenTopology

UUID = "GPU-5f3a2c1e-0d6b-4a52-9d6e-0f2b8d1c7a90"
POD = {"exported_namespace": "ml", "exported_pod": "llm-1-0", "namespace": "monitoring", "pod": "dcgm-7x"}
PODS = {"pod:ml/llm-1-0": "by-pod", "pod:ml/llm-2-0": "by-agent"}
ON_GPU = {"UUID": UUID, "gpu": "3", "Hostname": "n1"}


def found(reference: str, labels: Mapping[str, str] | None = None, **known: str | tuple[str, ...]) -> str:
    """The job, or why there is none. ``told`` and ``seen`` are what the jobs and the agent know of the GPU."""
    keys = {"told": f"told:gpu:{UUID}", "seen": f"gpu:{UUID}"}
    written = {**PODS, "10.0.0.7": "n1", **{keys.get(key, key): jobs for key, jobs in known.items()}}
    job = job_lookup.resolve_job(reference, labels or {}, Topology(inventory.parse(written)))
    return f"{job.reason}: {job.why}" if isinstance(job, Unresolved) else job


@pytest.mark.parametrize(
    ("labels", "known", "job"),
    [
        (POD, {"told": "by-itself", "seen": "by-agent"}, "by-itself"),
        (POD, {"seen": "by-agent"}, "by-pod"),
        ({"job_name": "named"}, {"seen": "by-agent"}, "named"),
        ({}, {"seen": "by-agent"}, "by-agent"),
        (POD, {}, "by-pod"),
        (POD, {"told": ("by-pod", "other")}, "by-pod"),
        (POD, {"seen": ("by-pod", "other")}, "by-pod"),
        (POD, {"told": "by-pod", "seen": ("by-pod", "other")}, "by-pod"),
    ],
)
def test_the_job_on_a_gpu_is_asked_of_the_jobs_then_the_labels_then_the_agent(
    labels: dict[str, str], known: dict[str, str | tuple[str, ...]], job: str
) -> None:
    """The first that knows has the word; on a shared GPU it is the job that the labels name."""
    assert found(f"gpu:{UUID}", labels, **known) == job


@pytest.mark.parametrize(
    ("labels", "known", "why"),
    [
        ({}, {}, f"target_unknown: no job is known to use {UUID}"),
        ({}, {"told": ("a", "b")}, f"target_ambiguous: several jobs are known to use {UUID}: a, b"),
        ({}, {"told": "a", "seen": ("a", "b")}, "target_ambiguous"),
        (POD, {"told": "other", "seen": ("by-pod", "b")}, "target_ambiguous"),
        ({"job_name": "a", "training_job": "b"}, {"told": "c"}, "target_ambiguous: the labels disagree"),
        ({**POD, "pod": "llm-2-0", "namespace": "ml"}, {"told": "c"}, "target_ambiguous"),
    ],
)
def test_a_gpu_of_no_job_or_of_several_is_refused(
    labels: dict[str, str], known: dict[str, str | tuple[str, ...]], why: str
) -> None:
    """Never guessed, whoever else is sure."""
    assert found(f"gpu:{UUID}", labels, **known).startswith(why)


@pytest.mark.parametrize("name", [UUID, UUID.upper(), UUID.removeprefix("GPU-"), f"n1/{UUID}", f" {UUID} "])
def test_a_uuid_is_known_however_it_is_written(name: str) -> None:
    """And needs no node."""
    assert found(f"gpu:{name}", told="llm") == "llm"


@pytest.mark.parametrize("name", ["n1/3", "10.0.0.7/3", "10.0.0.7:9400/03", "n1/0000:18:00.0", "n1/00000000:18:00"])
def test_an_index_or_address_is_one_of_its_node(name: str) -> None:
    """By the node's name or address."""
    known = {"told:gpu:n1/3": "llm", "told:gpu:n1/18:00.0": "llm", "told:gpu:n2/3": "other"}
    assert found(f"gpu:{name}", **known) == "llm"


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("gpu:3", "target_unknown: GPU '3' is one of many; write gpu:<node>/3"),
        ("gpu:18:00.0", "target_unknown: GPU '18:00.0' is one of many"),
        ("gpu:", "target_unknown: 'gpu:' names no gpu for this alert"),
        ("gpu:10.9.9.9/3", "target_unknown: '10.9.9.9' is an address"),
        ("node:", "target_unknown: 'node:' names no node"),
        ("node:n9", "target_unknown: no job is known to use node 'n9'"),
        ("node:10.9.9.9", "target_unknown: '10.9.9.9' is an address"),
        ("pod:llm-1-0", "target_unknown: pod 'llm-1-0' is not written as <namespace>/<name>"),
        ("pod:ml/gone", "target_unknown: no job is known to use pod 'ml/gone'"),
    ],
)
def test_a_reference_that_leads_nowhere_says_what_is_wrong_with_it(reference: str, why: str) -> None:
    """In the history, where somebody reads it."""
    assert found(reference).startswith(why)


@pytest.mark.parametrize(
    ("labels", "job"),
    [
        (ON_GPU, "llm"),
        ({"uuid": UUID}, "llm"),
        ({"gpu_id": "3", "instance": "10.0.0.7:9445"}, "llm"),
        ({"job_name": "named"}, "named"),
        ({"job_name": "named", "gpu": "3"}, "named"),
        ({}, "target_unknown"),
        ({"gpu": "3"}, "target_unknown"),
        ({"gpu": "3", "gpu_id": "4", "node": "n1", "job_name": "named"}, "target_ambiguous"),
    ],
)
def test_the_alerts_own_gpu_is_that_which_its_labels_name(labels: dict[str, str], job: str) -> None:
    """By the same labels as for a target that is a GPU; where they name none, they may still name the job."""
    assert found("gpu:alert", labels, told="llm", **{"told:gpu:n1/3": "llm"}).partition(":")[0] == job


def test_the_job_on_a_node_and_of_a_pod() -> None:
    """What a job says of itself goes before what its pods are called; two on a node are refused."""
    assert found("node:n1", **{"told:node:n1": "llm", "node:n1": "llm-jobset"}) == "llm"
    assert found("node:10.0.0.7:9100", **{"node:n1": "llm-jobset"}) == "llm-jobset"
    assert found("node:n1", **{"told:node:n1": "llm", "node:n1": ("a", "b")}).startswith("target_ambiguous")
    assert found("pod:ml/llm-1-0") == "by-pod"


def test_other_text_is_a_jobs_name() -> None:
    """With a colon in it too."""
    assert found("llm-1") == "llm-1"
    assert found("team:llm-1") == "team:llm-1"


def test_keys_of_gpus() -> None:
    """Written by people, by exporters and by agents, they come to the same."""
    assert gpu_names.key("00000000:18:00.0", "n1") == gpu_names.key("18:00", "n1") == "n1/0000:18:00.0"
    written = inventory.parse({"gpu:GPU-5F3A": "seen", "told:gpu:n1/3": "told", "pod:ml/GPU-1": "by-pod"})
    assert written == WrittenTopology(
        observed_by_gpu={"5f3a": frozenset({"seen"})},
        reported_by_gpu={"n1/3": frozenset({"told"})},
        jobs_by_pod={"ml/GPU-1": frozenset({"by-pod"})},
    )
