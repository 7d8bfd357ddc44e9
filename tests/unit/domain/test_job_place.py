"""A job of one name is another job where it runs elsewhere: by namespace, by node, and by GPU."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain import job_lookup
from trainmedic_server.domain.target_resolution import resolve
from trainmedic_server.domain.topology import AgentTopology, ClusterNode, ClusterTopology, JobTopology, Pod, Topology

OURS, THEIRS, SPARE = (f"GPU-5a0{n}1111-2222-4333-8444-0000000000aa" for n in (1, 2, 3))


def reported(uuid: str, index: int, *pods: str) -> dict[str, Any]:
    return {"uuid": uuid, "index": index, "pods": list(pods)}


AGENTS = AgentTopology.of(
    {"h1": {"gpus": [reported(OURS, 0, "p1"), reported(SPARE, 1, "p3")]}, "h2": {"gpus": [reported(THEIRS, 0, "p2")]}}
)
JOBS = JobTopology.of({"bert": {"placement": [{"rank": 0, "node": "h1", "gpu": OURS}]}}, AGENTS)
PODS = [
    Pod("p1", "nlp", "bert-0", "h1", "bert", ("10.3.0.1",), gpus=1),
    Pod("p2", "vision", "bert-0", "h2", "bert", ("10.3.0.2",), gpus=1),
    Pod("p3", "audio", "bert-0", "h1", "bert", ("10.3.0.3",), gpus=1),
    Pod("p4", "monitoring", "kube-state-metrics-0", "h3", None, ("10.3.0.4",)),
    Pod("p5", "trainmedic", "metrics-0", "h3", None, ("10.3.0.5",)),
]
NODES = tuple(ClusterNode(name, ()) for name in ("h1", "h2", "h3"))
KNOWN = Topology(jobs=JOBS, agents=AGENTS, cluster=ClusterTopology(NODES, {pod.uid: pod for pod in PODS}))
"""Three jobs of one name in three namespaces; that of ``nlp`` takes commands."""
KSM = {"job": "kube-state-metrics", "instance": "10.3.0.4:8080"}


def job_of(reference: str, labels: dict[str, str], topology: Topology = KNOWN) -> str:
    if reference:
        job = job_lookup.resolve_job(reference, labels, topology)
        return job if isinstance(job, str) else job.reason
    target = resolve(TargetKind.JOB, labels, topology)
    return str(target.job) if isinstance(target, Target) else target.reason


@pytest.mark.parametrize(
    ("reference", "labels"),
    [
        ("", {"job_name": "bert", "namespace": "nlp", **KSM}),
        ("", {"job_name": "bert", "exported_namespace": "nlp", "namespace": "monitoring"}),
        ("", {"namespace": "nlp", "pod": "bert-0", **KSM}),
        ("", {"job_name": "bert", "instance": "h1:9108", "job": "training"}),
        ("", {"job_name": "bert", "namespace": "trainmedic", "pod": "metrics-0", "instance": "10.3.0.5:8080"}),
        ("gpu:alert", {"UUID": OURS, "Hostname": "h1", "exported_namespace": "nlp", "exported_pod": "bert-0"}),
        ("gpu:alert", {"gpu": "0", "Hostname": "h1"}),
        ("pod:nlp/bert-0", {}),
        ("bert", {}),
        ("bert", {"exported_namespace": "nlp"}),
        ("", {"job_name": "bert", "node": "h2", "source": "diagnosis", "alertname": "TrainingFailed"}),
    ],
)
def test_the_job_that_runs_where_the_alert_says_is_taken(reference: str, labels: dict[str, str]) -> None:
    """The namespace of an exporter is not that of the job."""
    assert job_of(reference, labels) == "bert"


@pytest.mark.parametrize(
    ("reference", "labels"),
    [
        ("", {"job_name": "bert", "namespace": "vision", **KSM}),
        ("", {"job_name": "bert", "exported_namespace": "vision", "namespace": "monitoring"}),
        ("", {"job_name": "bert", "namespace": "elsewhere", **KSM}),
        ("gpu:alert", {"UUID": OURS, "exported_namespace": "vision", "exported_pod": "bert-0"}),
        (f"gpu:{OURS}", {"namespace": "vision", "pod": "bert-0"}),
        ("gpu:alert", {"gpu": "0", "node": "h1", "instance": "10.3.0.3:8000", "namespace": "audio", "pod": "bert-0"}),
        ("", {"namespace": "vision", "pod": "bert-0", **KSM}),
        ("", {"namespace": "audio", "pod": "bert-0", **KSM}),
        ("", {"job_name": "bert", "UUID": THEIRS}),
        ("", {"job_name": "bert", "UUID": SPARE}),
        ("", {"job_name": "bert", "Hostname": "h2"}),
        ("", {"job_name": "bert", "Hostname": "h9"}),
        ("gpu:alert", {"UUID": THEIRS, "Hostname": "h2", "exported_namespace": "vision", "exported_pod": "bert-0"}),
        ("gpu:alert", {"gpu": "0", "Hostname": "h2"}),
        ("gpu:alert", {"UUID": SPARE, "exported_namespace": "audio", "exported_pod": "bert-0"}),
        ("gpu:alert", {"UUID": OURS, "Hostname": "h2"}),
        (f"gpu:{SPARE}", {}),
        ("node:h2", {}),
        ("pod:vision/bert-0", {}),
        ("bert", {"exported_namespace": "vision"}),
    ],
)
def test_a_job_of_the_same_name_elsewhere_is_refused(reference: str, labels: dict[str, str]) -> None:
    """On another node, on another GPU of the same node, or in another namespace."""
    assert job_of(reference, labels) == "target_ambiguous"


def test_without_a_cluster_the_ranks_alone_tell() -> None:
    """By the nodes and GPUs that they report."""
    alone = replace(KNOWN, cluster=ClusterTopology())
    assert job_of("", {"job_name": "bert", "namespace": "vision"}, alone) == "bert"
    assert job_of("", {"job_name": "bert", "namespace": "vision", "Hostname": "h2"}, alone) == "target_ambiguous"
    assert job_of("", {"job_name": "bert", "UUID": SPARE}, alone) == "target_ambiguous"


def test_a_job_may_say_in_which_namespace_it_runs() -> None:
    """Then no cluster is needed to tell two teams' jobs apart."""
    jobs = JobTopology.of({"bert": {"placement": [], "namespace": "nlp"}, "odd": {"namespace": 7}}, AGENTS)
    known = Topology(jobs=jobs, agents=AGENTS)
    assert job_of("", {"job_name": "bert", "exported_namespace": "nlp"}, known) == "bert"
    assert job_of("", {"job_name": "bert", "namespace": "vision", **KSM}, known) == "target_ambiguous"
    assert job_of("", {"job_name": "odd", "namespace": "vision", **KSM}, known) == "odd"


def test_a_job_of_whose_place_nothing_is_known_is_taken_at_its_word() -> None:
    """One that reports host names that nobody can place, or none at all."""
    odd = JobTopology.of({"bert": {"placement": [{"rank": 0, "node": "container-7"}]}}, AGENTS)
    assert job_of("", {"job_name": "bert", "Hostname": "h2"}, Topology(jobs=odd, agents=AGENTS)) == "bert"
    assert job_of("", {"job_name": "other", "Hostname": "h2"}) == "other"
    unsure = JobTopology.of({"bert": {"placement": [{"rank": 0, "node": "h1"}]}}, AGENTS)
    assert job_of("", {"job_name": "bert", "UUID": SPARE}, Topology(jobs=unsure, agents=AGENTS)) == "bert"
