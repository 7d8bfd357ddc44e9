"""Modes of parts of the cluster, such as enforce for a canary pool."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec import Struct

from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain import places, selectors
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.selectors import NAME, Selector
from trainmedic_server.domain.topology import Topology


class ModeEntry(Struct, frozen=True):
    selector: Selector
    mode: Mode

    def __str__(self) -> str:
        return f"{self.selector.target.key} {self.mode}"


class TargetModes(Struct, frozen=True):
    """Entries in the order of their file; the first that fits a job by name, or a node, counts."""

    entries: tuple[ModeEntry, ...] = ()

    def of(self, target: Target | None, server: Mode, topology: Topology) -> tuple[Mode, str]:
        """Return the mode for a target, and the entry that set it; "" for the server's.

        Of several nodes or possible entries, the strictest counts.
        """
        if not self.entries or target is None or target.kind in (TargetKind.CLUSTER, TargetKind.GROUP):
            return server, ""
        if target.kind is TargetKind.JOB:
            for entry in self.entries:
                if entry.selector.kind is TargetKind.JOB and target.job in dict(entry.selector.terms).get(NAME, ()):
                    return entry.mode, f"the modes file says: {entry}"
        of_nodes = [entry for entry in self.entries if entry.selector.kind is TargetKind.NODE]
        if not of_nodes:
            return server, ""
        nodes = places.nodes_of(target, topology)
        unclear = _why_unclear(of_nodes, nodes, topology)
        if unclear:
            return _strictest(server, [(entry.mode, f"{entry} ({unclear})") for entry in of_nodes])
        modes: list[tuple[Mode, str]] = []
        for node in nodes:
            first = next((entry for entry in of_nodes if _fits(node, entry.selector, topology)), None)
            modes.append((server, "") if first is None else (first.mode, str(first)))
        strictest = min((mode for mode, _ in modes), key=list(Mode).index)
        source = next((entry for mode, entry in modes if mode is strictest and entry), "")
        return strictest, f"the modes file says: {source}" if source else ""


def of_members(modes: Collection[Mode]) -> Mode:
    """Return a parent run's mode: approve if a member has it, else enforce, else observe."""
    if Mode.APPROVE in modes:
        return Mode.APPROVE
    return Mode.ENFORCE if Mode.ENFORCE in modes else Mode.OBSERVE


def _why_unclear(entries: Iterable[ModeEntry], nodes: Collection[str], topology: Topology) -> str:
    if not nodes:
        return "the nodes of the target are not known"
    if not topology.answers:
        return "a source of the topology does not answer"
    known = {name for attributes in topology.attributes_by_node.values() for name in attributes}
    for entry in entries:
        missing = next((name for name, _ in entry.selector.terms if name not in (NAME, *known)), None)
        if missing is not None:
            return f"no node has an attribute {missing!r}"
    return ""


def _fits(node: str, selector: Selector, topology: Topology) -> bool:
    for name, values in selector.terms:
        if name == NAME:
            if not any(node in topology.known.find(value) for value in values):
                return False
        elif not selectors.has_value(node, name, values, topology):
            return False
    return True


def _strictest(server: Mode, entries: Iterable[tuple[Mode, str]]) -> tuple[Mode, str]:
    mode, why = server, ""
    for each, text in entries:
        if Mode.stricter(each, mode) is not mode:
            mode, why = each, f"the modes file says: {text}"
    return mode, why
