"""Capacity for a group's members under ``rollout.max_unavailable``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_core.target import Target
from trainmedic_server.domain import available_nodes, places, selectors
from trainmedic_server.domain.identity import Unresolved
from trainmedic_server.domain.playbook import Rollout
from trainmedic_server.domain.selectors import Selector
from trainmedic_server.domain.topology import Topology

_SHOWN = 3  # nodes in a reason
SETTLES_AFTER = timedelta(seconds=10)  # Time until the topology shows what a member has left behind


class Capacity(Struct, frozen=True):
    pool: int  # number of nodes
    allowed: int  # how many of them may be unavailable
    out: Mapping[str, str]  # unavailable nodes, with the reason
    others: frozenset[str] = frozenset()
    """Nodes at work for other runs. A member there would wait for its lock and grow stale."""

    def __str__(self) -> str:
        return f"{len(self.out)} of {self.pool} nodes are unavailable, at most {self.allowed} may be"

    @property
    def reasons(self) -> str:
        shown = [f"{node}: {why}" for node, why in list(self.out.items())[:_SHOWN]]
        more = len(self.out) - len(shown)
        return "; ".join([*shown, *([f"{more} more"] if more else [])])

    def why_held(self, members: Collection[str], topology: Topology) -> str:
        then = self.after(members, topology)
        if len(then.out) < then.allowed and self.others:
            return f"other runs work on {', '.join(sorted(self.others)[:_SHOWN])}"
        return str(then)

    def after(self, members: Collection[str], topology: Topology) -> Capacity:  # once these members work
        nodes = selectors.nodes_of(list(map(Target.of_key, members)), topology)
        return replace(self, out={**dict.fromkeys(sorted(nodes), available_nodes.HAS_RUN), **self.out})


def of(
    rules: Rollout,
    target: Target,
    members: Collection[Target],
    topology: Topology,
    own: Collection[str] = (),
    of_all: Collection[str] = (),
) -> Capacity | str | None:
    """Return the capacity, or why it is not known; None without ``max_unavailable``.

    Nodes at work: `own` for its members, `of_all` for all runs.
    """
    if rules.max_unavailable is None:
        return None
    unknown = available_nodes.why_unknown(topology)
    if unknown is not None:
        return unknown
    selected = selectors.nodes_selected(Selector.of(target), topology)
    if isinstance(selected, Unresolved):
        return f"it is not known how many nodes are unavailable: {selected.why}"
    nodes = {*selected, *selectors.nodes_of(members, topology)}
    of_all = set(map(topology.known.name_of, of_all))  # names change as agents come and go
    out = available_nodes.unavailable(topology.pool("", sorted(nodes, key=selectors.natural)), {*own, *of_all})
    foreign = frozenset(nodes.intersection(of_all).difference(own))
    return Capacity(len(nodes), rules.unavailable_allowed(len(nodes)), out, foreign)


def fitting(capacity: Capacity, ordered: Sequence[str], count: int, topology: Topology) -> list[str]:
    """Return the first `count` members that fit."""
    taken, fit = set(capacity.out), list[str]()
    for key in ordered:
        if len(fit) == count:
            break
        nodes = places.nodes_of(Target.of_key(key), topology)  # those already out need no more room
        if nodes & capacity.others:
            continue
        if nodes <= taken or len(taken | nodes) <= capacity.allowed:
            taken |= nodes
            fit.append(key)
    return fit
