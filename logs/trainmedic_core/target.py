from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from msgspec import Struct

from trainmedic_core import gpu_names
from trainmedic_core.once import once


class TargetKind(StrEnum):
    # CONTRIBUTING.md lists the places that a new kind needs.
    GPU = "gpu"
    NODE = "node"
    JOB = "job"
    CLUSTER = "cluster"
    GROUP = "group"
    """Many nodes, GPUs or jobs, by a selector."""


NO_PARTS: Mapping[str, None] = MappingProxyType(dict.fromkeys(("node", "gpu", "job")))  # as `Target.parts`
LONGEST_NAME = 512
"""In bytes; Kubernetes allows 253."""


class Target(Struct, frozen=True, dict=True):
    kind: TargetKind
    node: str | None = None
    """Also a GPU's."""
    gpu: str | None = None
    """UUID, PCI address or index."""
    job: str | None = None
    group: str | None = None
    """Selector such as ``nodes:pool=h100``."""

    @once
    def key(self) -> str:
        """Text form: ``gpu:node-1/GPU-5f3a``, ``node:node-1``, ``job:llm-1``, ``cluster``, ``nodes:pool=h100``."""
        match self.kind:
            case TargetKind.GPU:
                return f"gpu:{self.node}/{self.gpu}"
            case TargetKind.NODE:
                return f"node:{self.node}"
            case TargetKind.JOB:
                return f"job:{self.job}"
            case TargetKind.CLUSTER:
                return "cluster"
            case TargetKind.GROUP:
                return self.group or ""

    @property
    def parts(self) -> dict[str, str | None]:
        """The names of its parts, as in JSON, expressions and commands."""
        return {"node": self.node, "gpu": self.gpu, "job": self.job}

    @classmethod
    def of_key(cls, key: str) -> Target:
        """Raises ValueError."""
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
            case "nodes" | "gpus" | "jobs" if name and is_fine:
                return cls(TargetKind.GROUP, group=key)
        raise ValueError(
            f"{key!r} is not a target, such as job:llm-1, node:node-1, gpu:node-1/0, cluster or nodes:pool=h100"
        )

    def overlaps(self, other: Target) -> bool:
        """Return whether runs on both could change the same thing.

        GPUs of one node with different kinds of names (UUID, index) may be the same. Members of a group are locked one
        by one.
        """
        if TargetKind.GROUP in (self.kind, other.kind):
            return self == other
        if TargetKind.CLUSTER in (self.kind, other.kind):
            return True
        if self.kind is TargetKind.JOB or other.kind is TargetKind.JOB:
            return self.kind is other.kind and self.job == other.job
        if self.node != other.node:
            return False
        if TargetKind.NODE in (self.kind, other.kind):
            return True
        if _naming(self.gpu) != _naming(other.gpu):
            return True
        return gpu_names.key(self.gpu or "") == gpu_names.key(other.gpu or "")


def _naming(gpu: str | None) -> str:
    if gpu is None:
        return "none"
    if gpu.isdigit():
        return "index"
    return "pci" if ":" in gpu else "uuid"
