from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Self

from msgspec import Struct

from trainmedic_core import gpu_names
from trainmedic_core.once import once


class TargetKind(StrEnum):
    # After adding one, run tests/unit/domain/test_target_kinds.py: it names the places to edit.
    # mypy names each `match` that lacks the new kind. A kind that contains others needs more:
    # - its case in `Target.overlaps` and in the server's `engine/locks`
    # - its nodes in `Run.also` (the server's `engine/matching.also_of`) if only the topology knows them, because
    #   `domain/places.counted_nodes` and `engine/claims` have none
    # - for earlier runs, a column or touched nodes: the breaker reads no other (`adapters/sql_store/statements`)

    parts: tuple[str, ...]
    """Fields of `Target` that name it. Only targets with the same first part overlap."""
    plural: str
    """Selector of a group of them; empty if there are no groups."""

    def __new__(cls, value: str, parts: tuple[str, ...] = (), plural: str = "") -> Self:
        kind = str.__new__(cls, value)
        kind._value_, kind.parts, kind.plural = value, parts, plural
        return kind

    GPU = "gpu", ("node", "gpu"), "gpus"
    NODE = "node", ("node",), "nodes"
    JOB = "job", ("job",), "jobs"
    CLUSTER = "cluster"
    GROUP = "group"
    """Many nodes, GPUs or jobs, by a selector."""


MEMBER_KINDS: Mapping[str, TargetKind] = {kind.plural: kind for kind in TargetKind if kind.plural}
PARTS = tuple(dict.fromkeys(part for kind in TargetKind for part in kind.parts))
NO_PARTS: Mapping[str, None] = MappingProxyType(dict.fromkeys(PARTS))  # as `Target.parts`
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
        if self.kind is TargetKind.GROUP:
            return self.group or ""
        names = "/".join(str(getattr(self, part)) for part in self.kind.parts)
        return f"{self.kind}:{names}" if self.kind.parts else str(self.kind)

    @property
    def parts(self) -> dict[str, str | None]:
        """The names of its parts, as in JSON, expressions and commands."""
        return {part: getattr(self, part) for part in PARTS}

    @classmethod
    def of_key(cls, key: str) -> Target:
        """Raises ValueError."""
        if key == TargetKind.CLUSTER:
            return cls(TargetKind.CLUSTER)
        prefix, _, name = key.partition(":")
        if name and key.isprintable() and len(name.encode()) <= LONGEST_NAME:
            if prefix in MEMBER_KINDS:
                return cls(TargetKind.GROUP, group=key)
            for kind in TargetKind:
                names = name.split("/", len(kind.parts) - 1)
                if kind == prefix and len(names) == len(kind.parts) and all(names):
                    return cls(kind, **dict(zip(kind.parts, names, strict=True)))
        raise ValueError(
            f"{key!r} is not a target, such as job:llm-1, node:node-1, gpu:node-1/0, cluster or nodes:pool=h100"
        )

    @once
    def whole(self) -> tuple[str, str | None]:
        """Its first part with its name. Targets that differ in it do not overlap, except with the cluster."""
        part = next(iter(self.kind.parts), "group")
        return part, getattr(self, part)

    def overlaps(self, other: Target) -> bool:
        """Return whether runs on both could change the same thing.

        Members of a group are locked one by one.
        """
        if TargetKind.GROUP in (self.kind, other.kind):
            return self == other
        if TargetKind.CLUSTER in (self.kind, other.kind):
            return True
        if self.whole != other.whole:
            return False
        if 1 in (len(self.kind.parts), len(other.kind.parts)):
            return True
        if self.may_be(other):
            return True
        return gpu_names.key(self.gpu or "") == gpu_names.key(other.gpu or "")

    def may_be(self, other: Target) -> bool:
        """Check for GPUs of one node with different kinds of names."""
        are_gpus = self.kind is other.kind is TargetKind.GPU and self.node == other.node
        return are_gpus and _naming(self.gpu) != _naming(other.gpu)


def _naming(gpu: str | None) -> str:
    if gpu is None:
        return "none"
    if gpu.isdigit():
        return "index"
    return "pci" if ":" in gpu else "uuid"
