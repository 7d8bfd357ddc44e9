"""The names of nodes, and which of them mean the same node: short names, full names, names within a cloud, addresses.

`NodeNames` is what one source knows. `KnownNodes` asks all sources. A short name and a full name are one node where
one is the beginning of the other (``gpu-7`` and ``gpu-7.site.example``) and nothing else fits: ``gpu-7.a`` and
``gpu-7.b`` are two nodes, and then ``gpu-7`` names neither. All look-ups are by key, because every alert makes some.

Pure. Who calls it: ``topology`` builds it, ``node_evidence`` asks it.
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
"""Parts of a full name that are looked at. Real names have six at most; a label can have thousands."""


_LONGEST_KEPT = 255
_MOST_KEPT = 20_000
_SHORTEST_HINT = 3
_MOST_SEARCHED = 2000


def spelled(name: str) -> str:
    """Return the name as it is compared: lower case, without a dot at its end; an IPv6 address in its short form."""
    text = name.strip().rstrip(".").lower()
    if ":" in text:
        try:
            return ipaddress.ip_address(text.partition("%")[0]).compressed
        except ValueError:
            return text
    return text


def is_address(host: str) -> bool:
    """Whether `host` is an IP address or a name of the loopback, which name no node."""
    if host in ("", "localhost"):
        return True
    if not (host[0].isdigit() or ":" in host):  # as nearly all names
        return False
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_same_spelling(name: str, other: str) -> bool:
    """Whether one name is the other, or its short form."""
    first, second = sorted((spelled(name), spelled(other)), key=len)
    return first == second or (bool(first) and not is_address(first) and second.startswith(f"{first}."))


class NodeNames(Struct, frozen=True, dict=True):
    """The nodes that one source knows, with what else each of them is called."""

    names: frozenset[str] = frozenset()
    aliases: Mapping[str, Nodes] = field(default_factory=dict)
    """Addresses and host names, and whose they are."""

    @cached_property
    def by_spelling(self) -> Mapping[str, Nodes]:
        """The nodes by every whole name and address."""
        nodes: dict[str, Nodes] = {}
        for name in self.names:
            _add(nodes, spelled(name), frozenset({name}))
        for alias, whose in self.aliases.items():
            _add(nodes, spelled(alias), whose)
        return nodes

    @cached_property
    def by_beginning(self) -> Mapping[str, Nodes]:
        """The nodes by each shorter form of their full names."""
        nodes: dict[str, Nodes] = {}
        for name, whose in self.by_spelling.items():
            for shorter in _shorter(name):
                _add(nodes, shorter, whose)
        return nodes

    @cached_property
    def longer_names(self) -> Mapping[str, Sequence[str]]:
        """The full names of nodes, by each shorter form."""
        longer: dict[str, list[str]] = {}
        for name in self.by_spelling:
            for shorter in _shorter(name):
                longer.setdefault(shorter, []).append(name)
        return longer

    @cached_property
    def spellings(self) -> Mapping[str, Sequence[str]]:
        """By node, what it is called besides its name."""
        called: dict[str, list[str]] = {}
        for alias, whose in self.aliases.items():
            for node in whose:
                called.setdefault(node, []).append(alias)
        return called

    def called(self, name: str) -> Nodes:
        """The nodes with exactly this name or address. The same name in another case counts where no node has it."""
        return frozenset({name}) if name in self.names else self.by_spelling.get(spelled(name), _NONE)

    def related(self, name: str) -> Nodes:
        """The nodes of which this is a shorter or longer name."""
        text = spelled(name)
        nodes = self.by_beginning.get(text, _NONE)
        for shorter in _shorter(text):
            nodes |= self.by_spelling.get(shorter, _NONE)
        return nodes


class KnownNodes(Struct, frozen=True, dict=True):
    """The nodes that any source knows, each by one name, whatever the label calls it."""

    agents: NodeNames
    cluster: NodeNames
    written: NodeNames
    remembered: NodeNames
    """Of agents that were there and are not."""

    @cached_property
    def _found(self) -> dict[str, Nodes]:
        """What was found before: the alerts of a fleet name the same nodes again and again."""
        return {}

    @cached_property
    def sources(self) -> tuple[NodeNames, ...]:
        """All of them, the one whose name for a node is used first. Commands reach a node by its agent's name."""
        return (self.agents, self.cluster, self.written, self.remembered)

    def find(self, name: str) -> Nodes:
        """The nodes that this name or address may mean: none, one, or several where the name is not enough."""
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
        """Whether any source knows a node by exactly this name."""
        return any(name in source.names for source in self.sources)

    def is_gone(self, name: str) -> bool:
        """Whether the node is known only from an agent that was there and is not."""
        return name in self.remembered.names and not any(name in source.names for source in self.sources[:-1])

    def who_knows(self, name: str) -> str:
        """Which sources know the node of this name, for a person."""
        titles = ("an agent", "the cluster", "the inventory", "an agent that is gone")
        knowing = (title for title, source in zip(titles, self.sources, strict=True) if name in source.names)
        return next(knowing, "nobody")

    def near(self, name: str) -> Iterator[str]:
        """Known nodes that a person may have meant, because one name contains the other. None of a large fleet: to
        look through all of it at each refusal would take long."""
        text = spelled(name).partition(".")[0]
        if len(text) >= _SHORTEST_HINT and len(self._all) <= _MOST_SEARCHED:
            yield from (node for node in sorted(self._all) if text in node or node in text)

    def counts(self) -> str:
        """How many nodes each source knows, for a person: ``agents (12), cluster (40)``."""
        titles = ("agents", "cluster", "inventory", "agents that are gone")
        counted = ((name, len(source.names)) for name, source in zip(titles, self.sources, strict=True))
        return ", ".join(f"{name} ({count})" for name, count in counted if count)

    @cached_property
    def _all(self) -> Nodes:
        return frozenset[str]().union(*(source.names for source in self.sources))

    def _is_elsewhere(self, name: str) -> bool:
        """Whether nodes with the beginning of this full name are known by full names, and by none that fits."""
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
        """The name by which a known node is used, which is its agent's where it has one."""
        sources = self.sources
        rank = next((number for number, source in enumerate(sources) if node in source.names), len(sources))
        if rank == 0:
            return node
        # An inventory says under which name an address is to be used, whoever else has that address.
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
    """The same value as before while no source has changed, with what was found by it."""
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
    """Which nodes of a source the name may mean, all of them: two make it the name of neither."""
    return source.called(name) | (_NONE if is_address(name) else source.related(name))


def _shorter(name: str) -> Iterator[str]:
    """``a.b`` and ``a`` of ``a.b.c``; nothing of an address."""
    if "." not in name or is_address(name):
        return
    parts = name.split(".", _MOST_PARTS)
    for count in range(1, min(len(parts), _MOST_PARTS)):
        yield ".".join(parts[:count])


def _add(nodes: dict[str, Nodes], key: str, whose: Nodes) -> None:
    before = nodes.get(key)
    nodes[key] = whose if before is None else before | whose
