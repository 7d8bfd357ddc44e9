"""Which nodes are measured with each other, and when. Pure."""

from __future__ import annotations

from typing import Mapping, Sequence, Tuple

Pair = Tuple[str, str]
"""Two nodes in the order of their names; the same one twice for the ranks within a node."""


def rounds(ranks_by_node: Mapping[str, Sequence[int]]) -> list[list[Pair]]:
    """The pairs that are measured at one time, round by round.

    First each node by itself, where it has several ranks; then each two nodes once, in as few rounds as there can be: a
    node is in one pair at a time, so that no pair shares a node's links with another.
    """
    nodes = sorted(ranks_by_node)
    within = [(node, node) for node in nodes if len(ranks_by_node[node]) > 1]
    turns: list[list[Pair]] = [within] if within else []
    # The circle method: one stays, the others move on by one place each round.
    circle: list[str | None] = [*nodes, None] if len(nodes) % 2 else list(nodes)
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        opposite = zip(circle[:half], reversed(circle[half:]), strict=True)
        turns.append([(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [sorted(turn) for turn in turns if turn]


def ranks_of(pair: Pair, ranks_by_node: Mapping[str, Sequence[int]]) -> list[int]:
    """The ranks of both nodes, in order."""
    return sorted({rank for node in pair for rank in ranks_by_node[node]})
