"""Who is where: the ranks of jobs, as they say themselves; GPUs and the pods on them, as agents see them; pods,
as the cluster knows them. And reading the first two from presences, which anybody may have written.

Pure. Not here: finding a target by it (``target``, ``job_names``), keeping it (``engine.topology_watch``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainmedic_server.domain import gpu_names

Known = Mapping[str, str | tuple[str, ...]]
"""What is known beyond an alert's labels; of several names nobody can tell which one is meant.

An address leads to its node's name. To jobs lead ``pod:<namespace>/<name>``; ``node:<node>`` and ``gpu:<key>``,
which the cluster and the agents know; and ``told:node:<node>`` and ``told:gpu:<key>``, which the jobs have told
themselves. The key of a GPU is that of `gpu_names.key`."""


def one_or_all(names: Collection[str]) -> str | tuple[str, ...]:
    """As `Known` has it."""
    return next(iter(names)) if len(names) == 1 else tuple(sorted(names))


def normal_key(written: str) -> str:
    """A key of `Known` as a person writes it: its GPU by any of its names."""
    for form in ("told:gpu:", "gpu:"):
        if written.startswith(form):
            node, _, gpu = written.removeprefix(form).rpartition("/")
            return f"{form}{gpu_names.key(gpu, node)}"
    return written


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that has a node and runs. ``gpus`` is how many it asks for, at least one where it asks for shares."""

    uid: str
    namespace: str
    name: str
    node: str
    job: str | None
    addresses: tuple[str, ...] = ()
    gpus: int = 0

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that answers its agent. ``pods`` are the uids of those that have a process on it."""

    node: str
    uuid: str
    index: int | None = None
    pci: str | None = None
    pods: tuple[str, ...] = ()

    def names(self) -> Iterator[str]:
        """Every key by which it is looked up."""
        yield gpu_names.key(self.uuid)
        if self.index is not None:
            yield gpu_names.key(str(self.index), self.node)
        if self.pci is not None:
            yield gpu_names.key(self.pci, self.node)


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank of a job, and where it said that it runs."""

    job: str
    rank: Any
    node: str
    gpu: str | None = None


def ranks_in(job: str, details: Mapping[str, Any]) -> list[Rank]:
    """The ranks that a job's presence places; an entry without a node places none."""
    return [
        Rank(job, entry.get("rank"), node, _text(entry.get("gpu")))
        for entry in _mappings(details.get("placement"))
        if (node := _text(entry.get("node"))) is not None
    ]


def gpus_in(node: str, details: Mapping[str, Any]) -> list[Gpu]:
    """The GPUs that an agent's presence lists."""
    found = []
    for entry in _mappings(details.get("gpus")):
        uuid, index, pods = _text(entry.get("uuid")), entry.get("index"), entry.get("pods")
        if uuid is None:
            continue
        pci = gpu_names.normal_pci(_text(entry.get("pci_bus_id")) or "")
        number = index if isinstance(index, int) and not isinstance(index, bool) and index >= 0 else None
        uids = tuple(uid for uid in pods if isinstance(uid, str)) if isinstance(pods, list) else ()
        found.append(Gpu(node, uuid, number, pci, uids))
    return found


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
