"""Resolution of targets from labels or names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from trainmedic_core import gpu_names
from trainmedic_core.target import LONGEST_NAME, Target, TargetKind
from trainmedic_core.target_labels import INDEX_LABELS, JOB_LABELS, PCI_LABELS, UUID_LABELS
from trainmedic_server.domain import job_place
from trainmedic_server.domain.alert_labels import AlertLabels, Label
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.node_evidence import UNKNOWN, NodeEvidence, host_of, slurm_nodes_sharing
from trainmedic_server.domain.node_names import is_address
from trainmedic_server.domain.topology import Topology

_MOST_HINTS = 3
_LONGEST_INDEXES = 100  # characters
_JOBSET = ("label_jobset_sigs_k8s_io_jobset_name",)  # kube-state-metrics' form of a JobSet's label


def resolve(
    kind: TargetKind,
    labels: Mapping[str, str],
    topology: Topology,
) -> Target | Unresolved:
    """Return the target named by `labels`. Ambiguous or unknown names are refused, never guessed."""
    match kind:
        case TargetKind.CLUSTER:
            return Target(kind)
        case TargetKind.JOB:
            job = job_named_by(labels, topology)
            return job if isinstance(job, Unresolved) else Target(kind, job=job)
        case TargetKind.NODE:
            node = node_named_by(labels, topology)
            return node if isinstance(node, Unresolved) else Target(kind, node=node)
        case TargetKind.GPU:
            return _gpu(AlertLabels(labels), topology)
        case TargetKind.GROUP:
            return Unresolved("target_unknown", "labels name no group; a playbook selects it")


def bounded(target: Target) -> Target | Unresolved:
    """Refuse a name that a database cannot store, or is too long for its index."""
    for part, name in {**target.parts, "selector": target.group}.items():
        shown = "GPU" if part == "gpu" else part
        if name is not None and "\0" in name:
            return Unresolved("target_unknown", f"the {shown}'s name has a NUL character: {name[:40]!r}")
        if name is not None and len(name.encode(errors="replace")) > LONGEST_NAME:
            begins = f"{name[:40]!r}…"
            return Unresolved("target_unknown", f"the {shown}'s name is longer than {LONGEST_NAME} bytes: {begins}")
    return target


def unknown_node(target: Target, topology: Topology, labels: Mapping[str, str] | None = None) -> Unresolved | None:
    """Return why the node is rejected as unknown. None if a source knows it or does not answer."""
    if target.node is None or not topology.knows_all_nodes or topology.known.knows(target.node):
        return None
    named = [f'{label}="{value}"' for label, value in (labels or {}).items() if host_of(value) == target.node]
    named_by = ", ".join(named) or repr(target.node)
    if shared := slurm_nodes_sharing(target.node, topology):
        why = f"{named_by} {UNKNOWN}: several Slurm nodes have this host name or address: {shared}"
        return Unresolved("target_unknown", why)
    why = f"{named_by} {UNKNOWN}: {topology.known.counts()} do not have it"
    near = list(islice(topology.known.near(target.node), _MOST_HINTS))
    return Unresolved("target_unknown", f"{why}; did you mean {' or '.join(near)}?" if near else why)


def confirmed(target: Target, topology: Topology) -> Target | Unresolved:
    """Return a manually entered target with its node's known name. Refused if unknown."""
    if target.node is None:
        return target
    node = named_node(target.node, topology)
    if isinstance(node, Unresolved):
        return node
    placed = Target(target.kind, node=node, gpu=target.gpu)
    return unknown_node(placed, topology) or placed


def placed_gpu(node: str, gpu: str, topology: Topology) -> Target | Unresolved:
    """Return the GPU given in a playbook. Refused if its UUID belongs to another node."""
    if gpu_names.is_of_one_node(gpu):
        return Target(TargetKind.GPU, node=node, gpu=gpu)
    return _gpu(AlertLabels({"node": node, "uuid": gpu}), topology)


def job_named_by(labels: Mapping[str, str], topology: Topology) -> str | Unresolved:
    """Return the job of the labels. Refused if it runs elsewhere than they say."""
    alert_labels = AlertLabels(labels)
    job = job_in_labels(alert_labels, topology)
    if isinstance(job, Unresolved):
        return job
    return job_place.contradiction(job, alert_labels, topology) or job


def gpu_named_by(labels: Mapping[str, str]) -> str | Unresolved:
    return _named_gpu(AlertLabels(labels))


def node_named_by(labels: Mapping[str, str], topology: Topology) -> str | Unresolved:
    return NodeEvidence(AlertLabels(labels), topology).node()


def node_reasons(labels: Mapping[str, str], topology: Topology) -> tuple[str, ...]:
    return tuple(NodeEvidence(AlertLabels(labels), topology).reasons())


def named_node(name: str, topology: Topology) -> str | Unresolved:
    """Return the known name of a node; an unknown name stays."""
    host = host_of(name)
    nodes = topology.known.find(host)
    if len(nodes) > 1:
        several = " or ".join(sorted(nodes))
        return Unresolved("target_ambiguous", f"{host!r} may be {several}; write the whole name")
    node = next(iter(nodes), None) or topology.node_at(host)
    if node is None and is_address(host):
        return Unresolved("target_unknown", f"{host!r} is an address that no inventory maps to a node")
    return node or host


def job_in_labels(labels: AlertLabels, topology: Topology) -> str | Unresolved:
    """Return the job of the labels, wherever it runs."""
    sets = [label.value for label in labels.of(_JOBSET)]
    is_part = (lambda label: any(_is_part_of(label.value, name) for name in sets)) if sets else None
    named = _single(labels, JOB_LABELS, "job", is_skipped=is_part)
    if isinstance(named, str) or named.reason == "target_ambiguous":
        return named
    # One of the pods may be the exporter's, which has no job.
    jobs = {job for pod in job_place.pods_named(labels) for job in topology.jobs_of_pod(pod)}
    if len(jobs) > 1:
        return Unresolved("target_ambiguous", f"the labels' pods belong to several jobs: {', '.join(sorted(jobs))}")
    return jobs.pop() if jobs else named


def _gpu(labels: AlertLabels, topology: Topology) -> Target | Unresolved:
    gpu = _named_gpu(labels)
    if isinstance(gpu, Unresolved) and gpu.reason == "target_unknown":
        return gpu
    evidence = NodeEvidence(labels, topology)
    if isinstance(gpu, str) and (counted := counted_by_pod(gpu, evidence)) is not None:
        return counted
    node = evidence.node()
    if isinstance(gpu, Unresolved) and isinstance(node, str):  # an index and an address may name the same card
        gpu = _named_gpu(labels, same=lambda name: topology.agents.uuid_key(name, node))
    if isinstance(gpu, Unresolved):
        return gpu
    if isinstance(node, Unresolved):
        return node
    if (other := _other_address(labels, gpu, node, topology)) is not None:
        return Unresolved("target_ambiguous", f"the labels disagree on the GPU: {gpu!r}, {other}")
    # Use the agent's spelling: two spellings of a UUID must not be two targets.
    reported = topology.agents.gpus_by_key.get(gpu_names.key(gpu)) if not gpu_names.is_of_one_node(gpu) else None
    return Target(TargetKind.GPU, node=node, gpu=gpu if reported is None else reported.uuid)


def _other_address(labels: AlertLabels, gpu: str, node: str, topology: Topology) -> Label | None:
    """Return a label with the PCI address of another card of the node than that of an index."""
    if not gpu_names.is_index(gpu):
        return None
    cards, key = topology.agents.gpus_by_key, gpu_names.key(gpu, node)
    for label in labels.of(PCI_LABELS):
        card = cards.get(gpu_names.key(label.value, node)) if gpu_names.normal_pci(label.value) else None
        if card is not None and key in cards and cards[key] is not card:
            return label
    return None


# A container counts its own GPUs from 0.
def counted_by_pod(gpu: str, evidence: NodeEvidence) -> Unresolved | None:
    pod = evidence.measuring_workload() if gpu_names.is_index(gpu) else None
    if pod is None:
        return None
    return Unresolved("target_unknown", f"pod {pod} counts its own GPUs; no label has the UUID or PCI address")


def _named_gpu(labels: AlertLabels, same: Callable[[str], str] = gpu_names.key) -> str | Unresolved:
    uuids = [label for label in labels.of(UUID_LABELS) if not gpu_names.is_of_one_node(label.value)]
    cards = {gpu_names.uuid_key(label.value): gpu_names.card_uuid(label.value) for label in uuids}
    if len(cards) > 1:
        shown = ", ".join(f"{label.name.lower()}={label.value!r}" for label in uuids)
        return Unresolved("target_ambiguous", f"the labels disagree on the GPU UUID: {shown}")
    uuid = next(iter(cards.values()), None)
    if uuid is not None and not gpu_names.is_mig(uuid):
        return uuid
    others = (*(UUID_LABELS if uuid is None else ()), *INDEX_LABELS)
    gpu = _single(labels, others, "GPU", same, lambda label: not gpu_names.may_be_name(label.value))
    if isinstance(gpu, Unresolved) and gpu.reason == "target_unknown":
        gpu = _single(labels, PCI_LABELS, "GPU", same, lambda label: not gpu_names.normal_pci(label.value))
        if isinstance(gpu, Unresolved) and gpu.reason == "target_unknown":
            gpu = _not_named((*others, *PCI_LABELS), "GPU")
    unusable = [label for label in labels.of(INDEX_LABELS) if not gpu_names.may_be_name(label.value)]
    if isinstance(gpu, Unresolved) and gpu.reason == "target_unknown" and unusable:
        gpu = Unresolved("target_unknown", f"{unusable[0]} is no index, PCI address or UUID of a GPU")
    if isinstance(gpu, str) and (other := next((each for each in unusable if _has_other_index(each, gpu)), None)):
        return Unresolved("target_ambiguous", f"the labels disagree on the GPU: {gpu!r}, {other}")
    if isinstance(gpu, Unresolved) and uuid is not None and gpu.reason == "target_unknown":
        return Unresolved("target_unknown", f"{uuids[0]} is a MIG instance, and no label names the card that it is on")
    return gpu


# ``GPU 1``, ``nvidia1`` or ``0,1``, but no model.
_INDEXES = re.compile(r"(?:/dev/)?(?:gpus?|card|nvidia|device|accel)?[ :#_-]*[0-9]{1,2}(?:[ ,;]+[0-9]{1,2})*")


def _has_other_index(label: Label, gpu: str) -> bool:
    text = label.value.strip().lower()[:_LONGEST_INDEXES]
    is_numbered = gpu_names.is_index(gpu) and _INDEXES.fullmatch(text) is not None
    return is_numbered and set(map(int, re.findall("[0-9]+", text))) != {int(gpu)}


_JOB_OF_SET = re.compile("-.+-[0-9]+")


def _is_part_of(job: str, jobset: str) -> bool:
    """Return whether a Job is part of the JobSet, as ``llm-workers-0`` of ``llm``."""
    return job.startswith(f"{jobset}-") and _JOB_OF_SET.fullmatch(job, len(jobset)) is not None


def _single(
    labels: AlertLabels,
    names: tuple[str, ...],
    part: str,
    same: Callable[[str], str] = str,
    is_skipped: Callable[[Label], bool] | None = None,
) -> str | Unresolved:
    """Return the only value of these labels. Values with equal `same` are one."""
    values: dict[str, Label] = {}
    for label in labels.of(names):
        if is_skipped is None or not is_skipped(label):
            values.setdefault(same(label.value), label)
    if not values:
        return _not_named(names, part)
    if len(values) > 1:
        ordered = sorted(values.values(), key=lambda label: label.value)
        shown = ", ".join(f"{label.name.lower()}={label.value!r}" for label in ordered)
        return Unresolved("target_ambiguous", f"the labels disagree on the {part}: {shown}")
    return next(iter(values.values())).value


def _not_named(names: Sequence[str], part: str) -> Unresolved:
    looked = f"looked for {', '.join(names)}, each also with exported_ before it"
    return Unresolved("target_unknown", f"no label names the {part} ({looked})")
