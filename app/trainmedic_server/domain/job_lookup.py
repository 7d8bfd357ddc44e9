"""Lookup of the job that uses a node, GPU or pod: ``node:<node>``, ``gpu:<GPU>``, ``pod:<namespace>/<name>``.

Sources, in this order: the jobs, which report their ranks' locations; agents and schedulers. The first that knows a job
decides. For a node or pod, several jobs in any source are ambiguous. For a GPU the alert's labels come second; they
decide if a source knows several jobs, unless a source contradicts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainmedic_core import gpu_names
from trainmedic_server.domain import job_place, target_resolution
from trainmedic_server.domain.alert_labels import AlertLabels
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.node_evidence import NodeEvidence
from trainmedic_server.domain.topology import Jobs, Topology

OF_THE_ALERT = "alert"  # in gpu:alert: the GPU that the alert names


def resolve_job(reference: str, labels: Mapping[str, str], topology: Topology) -> str | Unresolved:
    """Return the job of a reference. Other texts are names of jobs."""
    form, colon, name = reference.partition(":")
    name = name.strip()
    if form == "slurm" and "_" in name:  # an array task's ID; Slurm and the SDK report its job's
        reference = topology.slurm.job_of(name)
    if not colon or form not in ("node", "gpu", "pod"):
        return job_place.contradiction(reference, AlertLabels(labels), topology) or reference
    if not name:
        return Unresolved("target_unknown", f"{reference!r} names no {form} for this alert")
    match form:
        case "node":
            return _on_node(name, topology)
        case "gpu":
            return _on_gpu(name, labels, topology)
        case _:
            return _of_pod(name, topology)


def _on_node(name: str, topology: Topology) -> str | Unresolved:
    node = target_resolution.named_node(name, topology)
    if isinstance(node, Unresolved):
        return node
    used = topology.jobs_on_node(node)
    job = _first_known(used, f"node {node!r}")
    if isinstance(job, Unresolved) or job in used.reported:
        return job
    return job_place.why_not_on(job, node, topology) or job


def _of_pod(name: str, topology: Topology) -> str | Unresolved:
    if "/" not in name:
        return Unresolved("target_unknown", f"pod {name!r} is not written as <namespace>/<name>")
    job = _first_known([topology.jobs_of_pod(name)], f"pod {name!r}")
    namespace, _, pod = name.partition("/")
    labels = AlertLabels({"exported_namespace": namespace, "exported_pod": pod})
    if isinstance(job, Unresolved) or name in topology.written.jobs_by_pod:
        return job
    return job_place.contradiction(job, labels, topology) or job


def _on_gpu(name: str, labels: Mapping[str, str], topology: Topology) -> str | Unresolved:
    alert_labels = AlertLabels(labels)
    named = target_resolution.job_in_labels(alert_labels, topology)
    if isinstance(named, Unresolved) and named.reason == "target_ambiguous":
        return named
    key = _key_of_alert(labels, topology) if name == OF_THE_ALERT else _key(name, topology)
    if isinstance(key, Unresolved):
        if isinstance(named, Unresolved) or key.reason != "target_unknown":
            return key
        return job_place.contradiction(named, alert_labels, topology) or named
    by_labels: Jobs = frozenset() if isinstance(named, Unresolved) else frozenset({named})
    reported, observed = topology.jobs_on_gpu(key)
    is_shared = len(reported) > 1 or len(observed) > 1
    if is_shared and by_labels and all(by_labels <= jobs for jobs in (reported, observed) if jobs):
        job: str | Unresolved = next(iter(by_labels))
    else:
        job = _first_known([reported, by_labels, observed], gpu_names.shown(key))
    if isinstance(job, Unresolved):
        return job
    if job in reported:
        return job_place.pod_elsewhere(key, alert_labels, topology) or job
    return job_place.contradiction(job, alert_labels, topology, used=key) or job


def _key(name: str, topology: Topology) -> str | Unresolved:
    node, slash, gpu = name.rpartition("/")
    if not slash:
        if gpu_names.is_of_one_node(name):
            return Unresolved("target_unknown", f"GPU {name!r} is one of many; write gpu:<node>/{name}, or its UUID")
        return gpu_names.key(name)
    node_name = target_resolution.named_node(node, topology)
    return node_name if isinstance(node_name, Unresolved) else gpu_names.key(gpu, node_name)


def _key_of_alert(labels: Mapping[str, str], topology: Topology) -> str | Unresolved:
    gpu = target_resolution.gpu_named_by(labels)
    if isinstance(gpu, Unresolved):
        return gpu
    if gpu_names.key(gpu) in topology.agents.gpus_by_key or gpu_names.key(gpu) in topology.agents.contested:
        # The UUID suffices; this only refuses labels that contradict it.
        node = target_resolution.node_named_by(labels, topology)
        if isinstance(node, Unresolved):
            return node
    if not gpu_names.is_of_one_node(gpu):
        return gpu_names.key(gpu)
    evidence = NodeEvidence(AlertLabels(labels), topology)
    if (counted := target_resolution.counted_by_pod(gpu, evidence)) is not None:
        return counted
    node = evidence.node()
    return node if isinstance(node, Unresolved) else gpu_names.key(gpu, node)


def _first_known(sources: Sequence[Jobs], used: str) -> str | Unresolved:
    """Return the job of the first source that knows one, unless any knows several. `used`: what it uses, for errors."""
    several = next((jobs for jobs in sources if len(jobs) > 1), None)
    if several is not None:
        return Unresolved("target_ambiguous", f"several jobs are known to use {used}: {', '.join(sorted(several))}")
    job = next((next(iter(jobs)) for jobs in sources if jobs), None)
    return job or Unresolved("target_unknown", f"no job is known to use {used}")
