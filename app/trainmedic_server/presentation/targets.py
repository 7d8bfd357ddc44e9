# Names of targets in texts for people.
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct

from trainmedic_core import gpu_names
from trainmedic_core.target import Target, TargetKind

IndexOf = Callable[[str], int | None]
"""Takes a GPU's UUID. Returns its index on its node, or None if it is unknown."""
_UUID_HEAD = 8  # characters
_WITH_NOUN = [kind for kind in TargetKind if len(kind.parts) == 1]
_GPU_IN_TEXT = re.compile(r"(?P<key>\bgpu:[^\s/,;]+/GPU-[0-9A-Fa-f-]{8,})|\bGPU (?P<uuid>GPU-[0-9A-Fa-f-]{8,})")


class TargetWords(Struct, frozen=True):
    kind: str
    name: str
    behind: str
    """Full name of a GPU, unless `name` contains it."""

    @property
    def noun(self) -> str:
        """The kind, unless the name shows it."""
        return self.kind if self.kind in _WITH_NOUN else ""

    def __str__(self) -> str:
        return f"{self.noun} {self.name}".strip()


def unknown(_: str) -> int | None:
    return None


def index_in(labels: Mapping[str, str]) -> IndexOf:
    """Return a lookup by labels that hold a UUID and, as ``gpu``, its index."""
    number = labels.get("gpu", "")
    named = {gpu_names.uuid_key(value) for value in labels.values()} if gpu_names.is_index(number) else set()
    return lambda uuid: int(number) if gpu_names.uuid_key(uuid) in named else None


def words(key: str, index_of: IndexOf = unknown) -> TargetWords:
    """Return ``node-1 · GPU 3``, ``job llm-1``. Other texts stay."""
    try:
        target = Target.of_key(key)
    except ValueError:
        return TargetWords("", key, "")
    if target.kind is TargetKind.GPU:
        name = gpu(target.gpu or "", index_of)
        return TargetWords("gpu", f"{target.node} · {name}", "" if name == f"GPU {target.gpu}" else str(target.gpu))
    return TargetWords(str(target.kind), key.partition(":")[2] if target.kind in _WITH_NOUN else key, "")


def cap_may_stay(change: Mapping[str, Any], lost: Iterable[Mapping[str, Any]]) -> str:
    """Return a warning if the agent that has to end a cap is lost, else ""."""
    if change["action"] != "gpu.power_limit":
        return ""
    nodes = {_node(key) for key in change.get("targets") or (change["target"],)}
    gone = sorted(each["name"] for each in lost if each["kind"] == "agent" and each["name"] in nodes)
    return f"agent {', '.join(gone)} is LOST: if it is dead, the cap stays until it restarts" if gone else ""


def _node(key: str) -> str | None:
    try:
        return Target.of_key(key).node
    except ValueError:
        return None


def gpu(name: str, index_of: IndexOf = unknown) -> str:
    """Return ``GPU 3``, or ``GPU 5f3a9c1e`` for a UUID with an unknown index."""
    if gpu_names.is_of_one_node(name):
        return f"GPU {name}"
    index = index_of(name)
    return f"GPU {index}" if index is not None else f"GPU {gpu_names.normal_uuid(name)[:_UUID_HEAD]}"


def within(key: str, index_of: IndexOf = unknown) -> str:
    """Return ``GPU 3 on node-1``, ``job llm-1``, ``the cluster``."""
    named = words(key, index_of)
    if named.kind == "cluster":
        return "the cluster"
    if named.kind != "gpu":
        return str(named)
    node, _, name = named.name.rpartition(" · ")
    return f"{name} on {node}"


def shortened(text: str, index_of: IndexOf = unknown) -> str:
    """Replace the UUIDs of GPUs in a text by their indexes or beginnings."""

    def named(match: re.Match[str]) -> str:
        return words(match["key"], index_of).name if match["key"] else gpu(match["uuid"], index_of)

    return _GPU_IN_TEXT.sub(named, text)
