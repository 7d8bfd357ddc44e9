"""Component of an alert, run, finding or verdict, for message routing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.domain.finding import CauseClass
from trainmedic_server.domain.own_source import DIAGNOSIS, SOURCE
from trainmedic_server.domain.run import Run

LABEL = "component"


class Component(StrEnum):
    GPU = "gpu"  # Includes other accelerators, drivers, and links within a node
    NETWORK = "network"
    STORAGE = "storage"
    NODE = "node"
    TRAINING = "training"
    TRAINMEDIC = "trainmedic"


# Other causes belong to the job, whose team looks first.
_BY_CAUSE: Mapping[str, Component] = {
    CauseClass.GPU: Component.GPU,
    CauseClass.NETWORK: Component.NETWORK,
    CauseClass.STORAGE: Component.STORAGE,
    CauseClass.NODE: Component.NODE,
}

_BY_WORD: Mapping[str, Component] = {
    **dict.fromkeys(("gpu", "nv", "nvidia", "nvlink", "dcgm", "xid", "accelerator", "amd", "npu"), Component.GPU),
    **dict.fromkeys(("network", "nccl", "infiniband", "rdma", "roce", "ethernet"), Component.NETWORK),
    **dict.fromkeys(("storage", "filesystem", "volume", "nfs", "lustre", "ceph"), Component.STORAGE),
    **dict.fromkeys(("node", "host", "disk", "memory", "cpu", "hardware", "kubelet", "machine"), Component.NODE),
    **dict.fromkeys(("training", "gradient", "loss", "job", "rank", "learning"), Component.TRAINING),
    "trainmedic": Component.TRAINMEDIC,
}

_BY_TARGET: Mapping[TargetKind, Component] = {
    TargetKind.GPU: Component.GPU,
    TargetKind.NODE: Component.NODE,
    TargetKind.JOB: Component.TRAINING,
    TargetKind.CLUSTER: Component.NODE,
    TargetKind.GROUP: Component.NODE,
}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_LONGEST_NAME = 200  # characters that are read


def component_of(labels: Mapping[str, str], playbook: str = "", target: Target | None = None) -> Component:
    """Return the component: of a verdict's cause, else the label ``component``, else derived.

    A verdict of low confidence belongs to the job.
    """
    if labels.get(SOURCE) == DIAGNOSIS and labels.get("cause"):
        is_low = labels.get("confidence", "low") == "low"
        return Component.TRAINING if is_low else _BY_CAUSE.get(labels["cause"], Component.TRAINING)
    label = labels.get(LABEL, "").strip().lower()
    if label in list(Component):
        return Component(label)
    named = _by_name(labels.get("alertname", "")) or _by_name(playbook)
    if named is not None:
        return named
    if target is not None:
        return _BY_TARGET[target.kind]
    if labels.get("job_name"):
        return Component.TRAINING
    return Component.NODE if labels.get("node") else Component.TRAINMEDIC


def component_of_run(run: Run) -> Component:
    return component_of(run.every_label, run.playbook, run.target)


def _by_name(name: str) -> Component | None:
    words = (word.lower() for word in _WORD.findall(name[:_LONGEST_NAME]))
    return next((_BY_WORD[word] for word in words if word in _BY_WORD), None)
