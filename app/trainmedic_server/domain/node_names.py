"""Node names and their equivalence: short, full and cloud names, addresses.

A name that is another's prefix (``gpu-7``, ``gpu-7.site.example``) means the same node if nothing else fits; with
``gpu-7.a`` and ``gpu-7.b`` known, ``gpu-7`` is ambiguous.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain

from msgspec import Struct, field

Nodes = frozenset[str]
_NONE: Nodes = frozenset()
_MOST_PARTS = 10  # real names have at most six, a label can have thousands
_LONGEST_KEPT = 255
_MOST_KEPT = 20_000  # cached lookups, of names up to _LONGEST_KEPT
_SHORTEST_HINT = 3  # characters; shorter names are part of too many others
_MOST_SEARCHED = 2000  # known names, beyond which `near` yields none


def spelled(name: str) -> str:
    """Return the name for comparison: lower case, no trailing dot, compressed IPv6, mapped IPv4 as IPv4."""
    text = name.strip().rstrip(".").lower()
    if ":" in text:
        try:
            address = ipaddress.ip_address(text.partition("%")[0])
            return str(getattr(address, "ipv4_mapped", None) or address)
        except ValueError:
            return text
    return text


def is_address(host: str) -> bool:
    """Return whether it cannot be a node's name: an IP address, ``localhost`` or empty."""
    if host in ("", "localhost"):
        return True
    if not (host[0].isdigit() or ":" in host):  # fast path for nearly all names
        return False
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_same_spelling(name: str, other: str) -> bool:
    """Return whether one name is the other or its short form."""
    first, second = sorted((spelled(name), spelled(other)), key=len)
    return first == second or (bool(first) and not is_address(first) and second.startswith(f"{first}."))


class NodeNames(Struct, frozen=True, dict=True):
    """Node names of one source, and its nodes by alias."""

    names: frozenset[str] = frozenset()
    aliases: Mapping[str, Nodes] = field(default_factory=dict)

    @cached_property
    def by_spelling(self) -> Mapping[str, Nodes]:
        nodes: dict[str, Nodes] = {}
        for name in self.names:
            _add(nodes, spelled(name), frozenset({name}))
        for alias, whose in self.aliases.items():
            _add(nodes, spelled(alias), whose)
        return nodes

    @cached_property
    def by_beginning(self) -> Mapping[str, Nodes]:
        nodes: dict[str, Nodes] = {}
        for name, whose in self.by_spelling.items():
            for shorter in _shorter(name):
                _add(nodes, shorter, whose)
        return nodes

    @cached_property
    def longer_names(self) -> Mapping[str, Sequence[str]]:
        longer: dict[str, list[str]] = {}
        for name in self.by_spelling:
            for shorter in _shorter(name):
                longer.setdefault(shorter, []).append(name)
        return longer

    @cached_property
    def aliases_by_node(self) -> Mapping[str, Sequence[str]]:
        aliases: dict[str, list[str]] = {}
        for alias, whose in self.aliases.items():
            for node in whose:
                aliases.setdefault(node, []).append(alias)
        return aliases

    def called(self, name: str) -> Nodes:
        """Return the nodes of this name; other spellings count only without an exact match."""
        return frozenset({name}) if name in self.names else self.by_spelling.get(spelled(name), _NONE)

    def related(self, name: str) -> Nodes:
        """Return the nodes of which this is a shorter or longer name."""
        text = spelled(name)
        nodes = self.by_beginning.get(text, _NONE)
        for shorter in _shorter(text):
            nodes |= self.by_spelling.get(shorter, _NONE)
        return nodes


class KnownNodes(Struct, frozen=True, dict=True):
    agents: NodeNames  # connected
    cluster: NodeNames
    slurm: NodeNames
    written: NodeNames  # the inventory's
    remembered: NodeNames  # of agents, lost ones too

    @cached_property
    def _found(self) -> dict[str, Nodes]:
        return {}

    @cached_property
    def sources(self) -> tuple[NodeNames, ...]:
        """In order of precedence: commands need the agent's name for a node."""
        return (self.agents, self.cluster, self.slurm, self.written, self.remembered)

    def find(self, name: str) -> Nodes:
        """Return preferred names: none if unknown, several if ambiguous."""
        nodes = self._found.get(name)
        if nodes is None:
            nodes = self._find(name)
            if len(name) <= _LONGEST_KEPT:
                if len(self._found) >= _MOST_KEPT:
                    self._found.clear()
                self._found[name] = nodes
        return nodes

    def _find(self, name: str) -> Nodes:
        written = self.written.aliases.get(name) or self.written.aliases.get(spelled(name))
        if written:
            return self._one_name_each(written)
        exact = frozenset[str]().union(*(source.called(name) for source in self.sources))
        if exact or is_address(name):
            return self._one_name_each(exact)
        related = frozenset[str]().union(*(source.related(name) for source in self.sources))
        return self._one_name_each(related) if related and not self._is_other_site(spelled(name)) else _NONE

    def knows(self, name: str) -> bool:
        return any(name in source.names for source in self.sources)

    def is_gone(self, name: str) -> bool:
        """Return whether only a lost agent had this name."""
        return name in self.remembered.names and not any(name in source.names for source in self.sources[:-1])

    def who_knows(self, name: str) -> str:
        titles = ("an agent", "the cluster", "Slurm", "the inventory", "an agent that is gone")
        knowing = (title for title, source in zip(titles, self.sources, strict=True) if name in source.names)
        return next(knowing, "nobody")

    def near(self, name: str) -> Iterator[str]:
        """Yield similar known names as hints; none in a large fleet, where the search is slow."""
        text = spelled(name).partition(".")[0]
        if len(text) >= _SHORTEST_HINT and len(self._all) <= _MOST_SEARCHED:
            yield from (node for node in sorted(self._all) if text in node or node in text)

    def counts(self) -> str:
        titles = ("agents", "cluster", "Slurm", "inventory", "agents that are gone")
        present = frozenset[str]().union(*(source.names for source in self.sources[:-1]))
        sizes = (*(len(source.names) for source in self.sources[:-1]), len(self.remembered.names - present))
        counted = zip(titles, sizes, strict=True)
        return ", ".join(f"{name} ({count})" for name, count in counted if count)

    @cached_property
    def _all(self) -> Nodes:
        return frozenset[str]().union(*(source.names for source in self.sources))

    def _is_other_site(self, name: str) -> bool:
        """Return whether full names with its beginning are known, and none is a form of it."""
        # With ``n1`` and ``n1.a`` known, ``n1.b`` is a node of another site.
        longer = (
            full
            for shorter in _shorter(name)
            for source in self.sources
            for full in source.longer_names.get(shorter, ())
        )
        first = next(longer, None)
        return first is not None and not any(is_same_spelling(full, name) for full in chain((first,), longer))

    def _one_name_each(self, nodes: Iterable[str]) -> Nodes:
        return frozenset(map(self.name_of, nodes))

    def name_of(self, node: str) -> str:
        """Return the name to use for a known node: its agent's, if any."""
        sources = self.sources
        rank = next((number for number, source in enumerate(sources) if node in source.names), len(sources))
        if rank == 0:
            return node
        # Not the inventory's addresses: in other sources, other nodes may have them.
        known_names = (node, *(_aliases(node, self.cluster, self.slurm) if rank < len(sources) else ()))
        for preferred in sources[:rank]:
            candidates = frozenset[str]().union(*(_best_matches(preferred, name) for name in known_names))
            if len(candidates) == 1:
                (name,) = candidates
                # The name must mean no other node of the source that listed this one.
                if rank == len(sources) or _all_matches(sources[rank], name) <= {node}:
                    return name
        return node


_last: KnownNodes | None = None  # result of the last known_nodes()


def known_nodes(
    agents: NodeNames, cluster: NodeNames, slurm: NodeNames, written: NodeNames, remembered: NodeNames
) -> KnownNodes:
    """Return the last value, with its cache, while each source is the same object."""
    global _last
    last = _last
    if (
        last is None
        or last.agents is not agents
        or last.cluster is not cluster
        or last.slurm is not slurm
        or last.written is not written
        or last.remembered is not remembered
    ):
        last = _last = KnownNodes(agents, cluster, slurm, written, remembered)
    return last


def _aliases(node: str, *sources: NodeNames) -> Iterator[str]:
    for source in sources:
        yield from source.aliases_by_node.get(node, ())


def _best_matches(source: NodeNames, name: str) -> Nodes:
    return source.called(name) or (_NONE if is_address(name) else source.related(name))


def _all_matches(source: NodeNames, name: str) -> Nodes:
    return source.called(name) | (_NONE if is_address(name) else source.related(name))


def _shorter(name: str) -> Iterator[str]:
    """Yield ``n1`` and ``n1.a`` for ``n1.a.example``."""
    if "." not in name or is_address(name):
        return
    parts = name.split(".", _MOST_PARTS)
    for count in range(1, min(len(parts), _MOST_PARTS)):
        yield ".".join(parts[:count])


def _add(nodes: dict[str, Nodes], key: str, whose: Nodes) -> None:
    before = nodes.get(key)
    nodes[key] = whose if before is None else before | whose
