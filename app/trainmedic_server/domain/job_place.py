"""Comparison of a job's known location with the alert's.

Jobs of two teams may share a name. A job that runs elsewhere is another job.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainmedic_core import gpu_names
from trainmedic_core.target_labels import UUID_LABELS
from trainmedic_server.domain import exporters, own_source
from trainmedic_server.domain.alert_labels import AlertLabels
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.node_evidence import NodeEvidence, host_of
from trainmedic_server.domain.node_names import is_address
from trainmedic_server.domain.topology import Pod, Topology

_NOWHERE: frozenset[str] = frozenset()


def contradiction(job: str, labels: AlertLabels, topology: Topology, used: str | None = None) -> Unresolved | None:
    """Return why the alert is not about the known job of this name.

    `used` is the GPU by which the job was found (`gpu_names.key`); None: the labels'.
    """
    if labels.value(own_source.SOURCE) == own_source.DIAGNOSIS:
        return None  # a verdict names the failed node; the job may have moved
    jobs = topology.jobs
    if not (job in jobs.nodes_by_job or job in jobs.namespace_by_job or job in topology.cluster.pods_by_job):
        return None
    evidence = NodeEvidence(labels, topology)
    return (
        _other_namespace(job, labels, topology, evidence)
        or _other_pod(job, labels, topology)
        or _other_node(job, labels, topology, evidence)
        or _other_gpu(job, used or _gpu_of(labels, topology), topology)
    )


def why_not_on(job: str, node: str, topology: Topology) -> Unresolved | None:
    """Return why the job is not on `node`; None if it is, or its nodes are unknown."""
    nodes = topology.nodes_of_job(job)
    if not nodes or node in nodes:
        return None
    reported = ", ".join(sorted(nodes)[:5])
    return Unresolved(
        "target_ambiguous", f"the alert is about {node}, and job {job} reports that its ranks run on {reported}"
    )


def pods_named(labels: AlertLabels) -> Iterator[str]:
    """Yield pods in the labels as ``<namespace>/<name>``."""
    namespace, exported = labels.value("namespace"), labels.value("exported_namespace")
    if name := labels.value("exported_pod"):
        yield f"{exported or namespace}/{name}"
    if name := labels.value("pod"):
        yield f"{namespace}/{name}"
        if exported and not labels.value("exported_pod"):
            yield f"{exported}/{name}"


def pod_elsewhere(key: str, labels: AlertLabels, topology: Topology) -> Unresolved | None:
    """Return why the alert's pod cannot use the GPU, else None."""
    gpu = topology.agents.gpus_by_key.get(key)
    for name in pods_named(labels) if gpu is not None else ():
        pod = topology.cluster.pods_by_full_name.get(name)
        if pod is None or pod.job is None or not pod.node or gpu is None:
            continue
        node, place = topology.known.name_of(gpu.node), topology.known.name_of(pod.node)
        if node != place:
            why = f"the alert names pod {pod}, which runs on {place}, and GPU {gpu.uuid} of {node}"
            return Unresolved("target_ambiguous", why)
    return None


def _other_namespace(job: str, labels: AlertLabels, topology: Topology, evidence: NodeEvidence) -> Unresolved | None:
    claimed = _namespace_of_subject(labels, topology, evidence)
    namespaces = _namespaces_of(job, topology) if claimed else _NOWHERE
    if not namespaces or claimed in namespaces:
        return None
    whose = ", ".join(sorted(namespaces))
    return Unresolved(
        "target_ambiguous", f"the alert is about namespace {claimed}, and the job {job} that is known runs in {whose}"
    )


def _namespace_of_subject(labels: AlertLabels, topology: Topology, evidence: NodeEvidence) -> str:
    exported, namespace = labels.value("exported_namespace"), labels.value("namespace")
    if exported or not namespace:
        return exported
    own = evidence.own_pod
    if own is not None and not _is_workload(own):
        return ""
    pod = topology.cluster.pods_by_full_name.get(f"{namespace}/{labels.value('pod')}")
    is_exporter = pod is not None and not _is_workload(pod) and not evidence.is_of_central
    return "" if is_exporter else namespace


def _namespaces_of(job: str, topology: Topology) -> frozenset[str]:
    namespace = topology.jobs.namespace_by_job.get(job)
    if namespace is not None:
        return frozenset({namespace})
    pods = topology.cluster.pods_by_job.get(job, ())
    if job not in topology.jobs.nodes_by_job:
        return frozenset(pod.namespace for pod in pods)
    of_ranks = frozenset(pod.namespace for pod in _pods_of_ranks(job, topology))
    if of_ranks:
        return of_ranks
    nodes = topology.nodes_of_job(job)
    on_nodes = frozenset(pod.namespace for pod in pods if topology.known.name_of(pod.node) in nodes)
    return on_nodes or frozenset(pod.namespace for pod in pods)


def _pods_of_ranks(job: str, topology: Topology) -> Iterator[Pod]:
    for name in topology.jobs.nodes_by_job.get(job, ()):
        pod = topology.cluster.pods_by_name.get(name)
        if pod is not None:
            yield pod
    for key in topology.jobs.keys_by_job.get(job, ()):
        gpu = topology.agents.gpus_by_key.get(key)
        pods = [topology.cluster.pods.get(uid) for uid in gpu.pods] if gpu is not None else []
        if len(pods) == 1 and pods[0] is not None:
            yield pods[0]


def _is_workload(pod: Pod) -> bool:
    """Return whether the pod does a job's work, so that it is no exporter."""
    return pod.job is not None or bool(pod.gpus)


def _other_pod(job: str, labels: AlertLabels, topology: Topology) -> Unresolved | None:
    behind = labels.under("exported_instance")
    if exporters.is_central(labels, exported=bool(behind)):
        return None
    for label in behind or labels.under("instance"):
        host = host_of(label.value)
        nodes = topology.known.find(host)
        if len(nodes) == 1:
            (node,) = nodes
            # A node without GPUs may host an exporter that measures other machines.
            if topology.agents.gpus_by_node.get(node) and (denied := why_not_on(job, node, topology)) is not None:
                return denied
        pod = topology.cluster.pods_by_address.get(host) if not nodes and is_address(host) else None
        if pod is None or not _is_workload(pod):
            continue
        if pod.job not in (None, job):
            why = f"{label} is pod {pod} of job {pod.job}, and the alert names job {job}"
            return Unresolved("target_ambiguous", why)
        namespaces = _namespaces_of(job, topology)
        if namespaces and pod.namespace not in namespaces:
            whose = ", ".join(sorted(namespaces))
            why = f"{label} is pod {pod}, and the job {job} that is known runs in {whose}"
            return Unresolved("target_ambiguous", why)
        if (denied := why_not_on(job, topology.known.name_of(pod.node), topology)) is not None:
            return denied
    return None


def _other_node(job: str, labels: AlertLabels, topology: Topology, evidence: NodeEvidence) -> Unresolved | None:
    if not evidence.is_of_central:
        nodes = evidence.known_subject()
        if len(nodes) == 1 and (denied := why_not_on(job, next(iter(nodes)), topology)) is not None:
            return denied
        unknown = evidence.unknown_subject() if topology.knows_all_nodes else None
        if unknown is not None and (denied := why_not_on(job, unknown, topology)) is not None:
            return denied
    for name in pods_named(labels):
        pod = topology.cluster.pods_by_full_name.get(name)
        if pod is not None and pod.job == job:
            denied = why_not_on(job, topology.known.name_of(pod.node), topology)
            if denied is not None:
                return denied
    return None


def _gpu_of(labels: AlertLabels, topology: Topology) -> str | None:
    keys = (gpu_names.uuid_key(label.value) for label in labels.of(UUID_LABELS))
    return next((key for key in keys if key in topology.agents.gpus_by_key), None)


def _other_gpu(job: str, key: str | None, topology: Topology) -> Unresolved | None:
    gpu = topology.agents.gpus_by_key.get(key) if key is not None else None
    if gpu is None or key is None or job not in topology.jobs.nodes_by_job:
        return None
    if job in topology.jobs.jobs_by_gpu.get(key, ()) or job in topology.written.reported_by_gpu.get(key, ()):
        return None
    node = topology.known.name_of(gpu.node)
    if (denied := why_not_on(job, node, topology)) is not None:
        return denied
    if gpu.node in topology.jobs.unsure_nodes.get(job, ()) or not topology.nodes_of_job(job):
        return None
    return Unresolved(
        "target_ambiguous",
        f"the alert is about GPU {gpu.uuid} of {node}, and job {job} reports that it uses others there",
    )
