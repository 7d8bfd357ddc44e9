"""Names of nodes, and which of them mean the same node: short names, full names, names within a cloud, addresses.

`NodeNames` are the names in one source. `KnownNodes` asks all sources. A short name and a full name are one node if one
is the beginning of the other (``gpu-7`` and ``gpu-7.site.example``) and nothing else fits. ``gpu-7.a`` and ``gpu-7.b``
are two nodes, and then ``gpu-7`` names neither. All look-ups are by key, because every alert makes some.

Pure. ``topology`` builds it, ``node_evidence`` asks it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain

from msgspec import Struct, field

Nodes = frozenset[str]
_NONE: Nodes = frozenset()
_MOST_PARTS = 10
"""Most parts of a full name that are used. Real names have six at most; a label can have thousands."""


_LONGEST_KEPT = 255
_MOST_KEPT = 20_000
_SHORTEST_HINT = 3
_MOST_SEARCHED = 2000


def spelled(name: str) -> str:
    """Return the name in the form for comparisons: lower case, without a dot at its end, an IPv6 address in its short
    form."""
    text = name.strip().rstrip(".").lower()
    if ":" in text:
        try:
            return ipaddress.ip_address(text.partition("%")[0]).compressed
        except ValueError:
            return text
    return text


def is_address(host: str) -> bool:
    """Return whether `host` is an IP address or a name of the loopback, which name no node."""
    if host in ("", "localhost"):
        return True
    if not (host[0].isdigit() or ":" in host):  # The case of nearly all names.
        return False
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_same_spelling(name: str, other: str) -> bool:
    """Return whether one name is the other, or its short form."""
    first, second = sorted((spelled(name), spelled(other)), key=len)
    return first == second or (bool(first) and not is_address(first) and second.startswith(f"{first}."))


class NodeNames(Struct, frozen=True, dict=True):
    """Nodes that one source knows, with their other names."""

    names: frozenset[str] = frozenset()
    aliases: Mapping[str, Nodes] = field(default_factory=dict)
    """Owners of addresses and host names."""

    @cached_property
    def by_spelling(self) -> Mapping[str, Nodes]:
        """Nodes by every whole name and address."""
        nodes: dict[str, Nodes] = {}
        for name in self.names:
            _add(nodes, spelled(name), frozenset({name}))
        for alias, whose in self.aliases.items():
            _add(nodes, spelled(alias), whose)
        return nodes

    @cached_property
    def by_beginning(self) -> Mapping[str, Nodes]:
        """Nodes by each shorter form of their full names."""
        nodes: dict[str, Nodes] = {}
        for name, whose in self.by_spelling.items():
            for shorter in _shorter(name):
                _add(nodes, shorter, whose)
        return nodes

    @cached_property
    def longer_names(self) -> Mapping[str, Sequence[str]]:
        """Full names of nodes, by each shorter form."""
        longer: dict[str, list[str]] = {}
        for name in self.by_spelling:
            for shorter in _shorter(name):
                longer.setdefault(shorter, []).append(name)
        return longer

    @cached_property
    def spellings(self) -> Mapping[str, Sequence[str]]:
        """Other names of each node."""
        called: dict[str, list[str]] = {}
        for alias, whose in self.aliases.items():
            for node in whose:
                called.setdefault(node, []).append(alias)
        return called

    def called(self, name: str) -> Nodes:
        """Return the nodes with exactly this name or address. The same name in another case counts if no node has
        it."""
        return frozenset({name}) if name in self.names else self.by_spelling.get(spelled(name), _NONE)

    def related(self, name: str) -> Nodes:
        """Return the nodes of which this is a shorter or longer name."""
        text = spelled(name)
        nodes = self.by_beginning.get(text, _NONE)
        for shorter in _shorter(text):
            nodes |= self.by_spelling.get(shorter, _NONE)
        return nodes


class KnownNodes(Struct, frozen=True, dict=True):
    """Nodes that any source knows, each by one name, whatever the label calls it."""

    agents: NodeNames
    cluster: NodeNames
    written: NodeNames
    remembered: NodeNames
    """Nodes of agents that are gone."""

    @cached_property
    def _found(self) -> dict[str, Nodes]:
        """Earlier results: the alerts of a fleet name the same nodes repeatedly."""
        return {}

    @cached_property
    def sources(self) -> tuple[NodeNames, ...]:
        """All sources, in order of the precedence of their names for a node. Commands reach a node by its agent's
        name."""
        return (self.agents, self.cluster, self.written, self.remembered)

    def find(self, name: str) -> Nodes:
        """Return the nodes that this name or address may mean: none, one, or several if the name is not specific
        enough."""
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
        return self._one_name_each(related) if related and not self._is_elsewhere(spelled(name)) else _NONE

    def knows(self, name: str) -> bool:
        """Return whether any source knows a node by exactly this name."""
        return any(name in source.names for source in self.sources)

    def is_gone(self, name: str) -> bool:
        """Return whether the node is known only from an agent that is gone."""
        return name in self.remembered.names and not any(name in source.names for source in self.sources[:-1])

    def who_knows(self, name: str) -> str:
        """Return the sources that know the node of this name, for a person."""
        titles = ("an agent", "the cluster", "the inventory", "an agent that is gone")
        knowing = (title for title, source in zip(titles, self.sources, strict=True) if name in source.names)
        return next(knowing, "nobody")

    def near(self, name: str) -> Iterator[str]:
        """Return known nodes that a person may have meant, because one name contains the other. None in a large fleet,
        because each refusal would search all of it."""
        text = spelled(name).partition(".")[0]
        if len(text) >= _SHORTEST_HINT and len(self._all) <= _MOST_SEARCHED:
            yield from (node for node in sorted(self._all) if text in node or node in text)

    def counts(self) -> str:
        """Return how many nodes each source knows, for a person: ``agents (12), cluster (40)``."""
        titles = ("agents", "cluster", "inventory", "agents that are gone")
        counted = ((name, len(source.names)) for name, source in zip(titles, self.sources, strict=True))
        return ", ".join(f"{name} ({count})" for name, count in counted if count)

    @cached_property
    def _all(self) -> Nodes:
        return frozenset[str]().union(*(source.names for source in self.sources))

    def _is_elsewhere(self, name: str) -> bool:
        """Return whether nodes with the beginning of this full name are known by full names, and by none that fits."""
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
        """Return the name to use for a known node: its agent's, if it has one."""
        sources = self.sources
        rank = next((number for number, source in enumerate(sources) if node in source.names), len(sources))
        if rank == 0:
            return node
        # The inventory decides which name an address has, even if other nodes have that address.
        called = (node, *(self.cluster.spellings.get(node, ()) if rank < len(sources) else ()))
        for better in sources[:rank]:
            better_names = frozenset[str]().union(*(_in(better, name) for name in called))
            if len(better_names) == 1:
                (name,) = better_names
                if rank == len(sources) or _back(sources[rank], name) <= {node}:
                    return name
        return node


_last: KnownNodes | None = None


def known_nodes(agents: NodeNames, cluster: NodeNames, written: NodeNames, remembered: NodeNames) -> KnownNodes:
    """Return the same value as before while no source has changed, so that its earlier results stay usable."""
    global _last
    last = _last
    if (
        last is None
        or last.agents is not agents
        or last.cluster is not cluster
        or last.written is not written
        or last.remembered is not remembered
    ):
        last = _last = KnownNodes(agents, cluster, written, remembered)
    return last


def _in(source: NodeNames, name: str) -> Nodes:
    return source.called(name) or (_NONE if is_address(name) else source.related(name))


def _back(source: NodeNames, name: str) -> Nodes:
    """Return all nodes of a source that the name may mean. If there are two, the name means neither."""
    return source.called(name) | (_NONE if is_address(name) else source.related(name))


def _shorter(name: str) -> Iterator[str]:
    """Return ``a.b`` and ``a`` for ``a.b.c``. Empty for an address."""
    if "." not in name or is_address(name):
        return
    parts = name.split(".", _MOST_PARTS)
    for count in range(1, min(len(parts), _MOST_PARTS)):
        yield ".".join(parts[:count])


def _add(nodes: dict[str, Nodes], key: str, whose: Nodes) -> None:
    before = nodes.get(key)
    nodes[key] = whose if before is None else before | whose
