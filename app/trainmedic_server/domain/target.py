"""What a run works on, when two targets overlap, and how labels name one.

Not here: what is known beyond an alert's labels, such as the node behind an address (``topology``); nor the job
that uses a GPU or a node (``job_lookup``).
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from trainmedic_server.domain.topology import Topology

_HOST_AND_PORT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(:\d+)?")


class TargetKind(StrEnum):
    """The kinds of target."""

    GPU = "gpu"
    NODE = "node"
    JOB = "job"
    CLUSTER = "cluster"


LONGEST_NAME = 512
"""In bytes, of a node, a GPU or a job. Kubernetes' own names have 253 at most."""


class Target(Struct, frozen=True):
    """What a run works on: a GPU (always with its node), a node, a job, or the cluster."""

    kind: TargetKind
    node: str | None = None
    """The name of the node, also of a GPU's; None for the other kinds."""
    gpu: str | None = None
    """A UUID, a PCI address or an index, as the alert named it. The agent on the node looks it up in its driver."""
    job: str | None = None
    """The name by which the job takes commands."""

    @property
    def key(self) -> str:
        """The target as text: ``gpu:node-1/GPU-5f3a``, ``node:node-1``, ``job:llm-1``, ``cluster``."""
        match self.kind:
            case TargetKind.GPU:
                return f"gpu:{self.node}/{self.gpu}"
            case TargetKind.NODE:
                return f"node:{self.node}"
            case TargetKind.JOB:
                return f"job:{self.job}"
            case TargetKind.CLUSTER:
                return "cluster"

    @classmethod
    def of_key(cls, key: str) -> Target:
        """The target with this `key`. Raises ValueError."""
        kind, _, name = key.partition(":")
        node, _, gpu = name.partition("/")
        is_fine = all(map(str.isprintable, key)) and len(name.encode()) <= LONGEST_NAME
        match kind:
            case "cluster" if not name and key == "cluster":
                return cls(TargetKind.CLUSTER)
            case "job" if name and is_fine:
                return cls(TargetKind.JOB, job=name)
            case "node" if name and is_fine:
                return cls(TargetKind.NODE, node=name)
            case "gpu" if node and gpu and is_fine:
                return cls(TargetKind.GPU, node=node, gpu=gpu)
        raise ValueError(f"{key!r} is not a target, such as job:llm-1, node:node-1, gpu:node-1/0 or cluster")

    def overlaps(self, other: Target) -> bool:
        """Whether two runs on these targets could change the same thing.

        The cluster covers everything, a node covers its GPUs. Where two GPUs of one node are named in different
        ways (one by UUID, one by index) nobody can tell here whether they are the same, so they overlap.
        """
        if TargetKind.CLUSTER in (self.kind, other.kind):
            return True
        if self.kind is TargetKind.JOB or other.kind is TargetKind.JOB:
            return self.kind is other.kind and self.job == other.job
        if self.node != other.node:
            return False
        if TargetKind.NODE in (self.kind, other.kind):
            return True
        return self.gpu == other.gpu or _naming(self.gpu) != _naming(other.gpu)


class Unresolved(Struct, frozen=True):
    """The labels name no target, or several."""

    reason: str
    """``target_unknown`` or ``target_ambiguous``; ``not_accepted`` where the alert map refuses the alert, so that its
    labels are not looked up here."""
    why: str
    """For a person: what is missing, or what disagrees."""


class IdentityLabels(Struct, frozen=True):
    """Which labels name a target, most trusted first. They are compared without regard to case.

    The defaults are the labels of dcgm-exporter, nvidia_gpu_exporter, node-exporter, kube-state-metrics and
    Trainmedic's own exporter. With each name its ``exported_`` form is looked up, which Prometheus makes when a
    scrape adds a label of the same name.
    """

    gpu_uuid: tuple[str, ...] = ("uuid", "gpu_uuid")
    gpu_index: tuple[str, ...] = ("gpu", "gpu_id")
    node: tuple[str, ...] = ("node", "nodename", "kubernetes_node", "hostname")
    job: tuple[str, ...] = (
        "job_name",
        "training_job",
        "label_training_kubeflow_org_job_name",
        "label_jobset_sigs_k8s_io_jobset_name",
        "label_batch_kubernetes_io_job_name",
        "label_job_name",
    )


def resolve(
    kind: TargetKind,
    labels: Mapping[str, str],
    topology: Topology,
    identity: IdentityLabels = IdentityLabels(),
) -> Target | Unresolved:
    """The target of `kind` that `labels` name; refused, never guessed, where they do not name one."""
    folded = _fold(labels)
    match kind:
        case TargetKind.CLUSTER:
            return Target(kind)
        case TargetKind.JOB:
            job = _job(folded, topology, identity)
            return job if isinstance(job, Unresolved) else Target(kind, job=job)
        case TargetKind.NODE:
            node = _node(folded, topology, identity)
            return node if isinstance(node, Unresolved) else Target(kind, node=node)
        case TargetKind.GPU:
            return _gpu(folded, topology, identity)


def bounded(target: Target) -> Target | Unresolved:
    """The target, unless a name in it is longer than any real one: no index of a database would take that."""
    for part, name in (("node", target.node), ("GPU", target.gpu), ("job", target.job)):
        if name is not None and len(name.encode(errors="replace")) > LONGEST_NAME:
            begins = f"{name[:40]!r}…"
            return Unresolved("target_unknown", f"the {part}'s name is longer than {LONGEST_NAME} bytes: {begins}")
    return target


def job_named_by(
    labels: Mapping[str, str], topology: Topology, identity: IdentityLabels = IdentityLabels()
) -> str | Unresolved:
    """The job that the labels name, or the pod that they name."""
    return _job(_fold(labels), topology, identity)


def gpu_named_by(labels: Mapping[str, str], identity: IdentityLabels = IdentityLabels()) -> str | Unresolved:
    """The GPU that the labels name, by UUID or by index."""
    return _named_gpu(_fold(labels), identity)


def node_named_by(
    labels: Mapping[str, str], topology: Topology, identity: IdentityLabels = IdentityLabels()
) -> str | Unresolved:
    """The node that the labels name."""
    return _node(_fold(labels), topology, identity)


def named_node(name: str, topology: Topology) -> str | Unresolved:
    """The node of that name, or with that address; a port after it is ignored."""
    host = host_of(name)
    node = topology.node_at(host)
    if node is None and is_address(host):
        return Unresolved("target_unknown", f"{host!r} is an address that no inventory maps to a node")
    return node or host


def _job(folded: Mapping[str, set[str]], topology: Topology, identity: IdentityLabels) -> str | Unresolved:
    named = _single(folded, identity.job, "job")
    if isinstance(named, str) or named.reason == "target_ambiguous":
        return named
    # One of the pods that the labels may mean can be the exporter's; it belongs to no job.
    pods = [(namespace, pod) for namespace in _values(folded, "namespace") for pod in _values(folded, "pod")]
    jobs = {job for namespace, pod in pods for job in topology.jobs_of_pod(f"{namespace}/{pod}")}
    if len(jobs) > 1:
        return Unresolved("target_ambiguous", f"the labels' pods belong to several jobs: {', '.join(sorted(jobs))}")
    return jobs.pop() if jobs else named


def _values(folded: Mapping[str, set[str]], name: str) -> set[str]:
    return folded.get(name, set()) | folded.get(f"exported_{name}", set())


def _gpu(folded: Mapping[str, set[str]], topology: Topology, identity: IdentityLabels) -> Target | Unresolved:
    gpu = _named_gpu(folded, identity)
    if isinstance(gpu, Unresolved):
        return gpu
    node = _node(folded, topology, identity)
    if isinstance(node, Unresolved):
        return node
    return Target(TargetKind.GPU, node=node, gpu=gpu)


def _named_gpu(folded: Mapping[str, set[str]], identity: IdentityLabels) -> str | Unresolved:
    gpu = _single(folded, identity.gpu_uuid, "GPU UUID")
    if isinstance(gpu, Unresolved) and gpu.reason == "target_unknown":
        gpu = _single(folded, identity.gpu_index, "GPU")
    return gpu


def _node(folded: Mapping[str, set[str]], topology: Topology, identity: IdentityLabels) -> str | Unresolved:
    named = _single(folded, identity.node, "node")
    if isinstance(named, str):
        return topology.node_at(named) or named
    if named.reason == "target_ambiguous":
        return named
    for instance in sorted(folded.get("instance", ())):
        host = host_of(instance)
        node = topology.node_at(host)
        if node is not None:
            return node
        if is_address(host):
            return Unresolved("target_unknown", f"instance {instance!r} is an address that no inventory maps to a node")
        if not _HOST_AND_PORT.fullmatch(instance):
            return Unresolved("target_unknown", f"instance {instance!r} is not a host with a port")
        return host
    return named


def _single(folded: Mapping[str, set[str]], names: Sequence[str], part: str) -> str | Unresolved:
    """The one value that the labels of these names agree on."""
    values: dict[str, str] = {}
    for form in _forms(tuple(names)):
        for value in folded.get(form, ()):
            values.setdefault(value, form)
    if not values:
        looked = f"looked for {', '.join(names)}, each also with exported_ before it"
        return Unresolved("target_unknown", f"no label names the {part} ({looked})")
    if len(values) > 1:
        shown = ", ".join(f"{form}={value!r}" for value, form in sorted(values.items()))
        return Unresolved("target_ambiguous", f"the labels disagree on the {part}: {shown}")
    return next(iter(values))


@functools.lru_cache
def _forms(names: tuple[str, ...]) -> tuple[str, ...]:
    """What labels of these names are called once they are folded."""
    return tuple(form for name in names for form in (name.lower(), f"exported_{name.lower()}"))


def _fold(labels: Mapping[str, str]) -> dict[str, set[str]]:
    folded: dict[str, set[str]] = {}
    for name, value in labels.items():
        if value.strip():
            folded.setdefault(name.lower(), set()).add(value.strip())
    return folded


def host_of(instance: str) -> str:
    """The host part of ``host:port``, ``[v6]:port``, or of a bare host or IPv6 address."""
    if instance.startswith("["):
        return instance[1:].partition("]")[0]
    if instance.count(":") > 1:
        return instance
    return instance.partition(":")[0]


def is_address(host: str) -> bool:
    """Whether `host` is an IP address or a name of the loopback, which name no node."""
    if host in ("", "localhost"):
        return True
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _naming(gpu: str | None) -> str:
    if gpu is None:
        return "none"
    if gpu.isdigit():
        return "index"
    return "pci" if ":" in gpu else "uuid"
