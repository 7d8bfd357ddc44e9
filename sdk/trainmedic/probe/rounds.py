from __future__ import annotations

from typing import Mapping, Sequence, Tuple

Pair = Tuple[str, str]  # Sorted; equal names for one node


def rounds(ranks_by_node: Mapping[str, Sequence[int]]) -> list[list[Pair]]:
    """Return pairs to measure concurrently, by round.

    First each node with several ranks alone, then each two nodes once.
    """
    nodes = sorted(ranks_by_node)
    within = [(node, node) for node in nodes if len(ranks_by_node[node]) > 1]
    turns: list[list[Pair]] = [within] if within else []
    # Circle method: one stays, the others move on by one place each round.
    circle: list[str | None] = [*nodes, None] if len(nodes) % 2 else list(nodes)
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        opposite = zip(circle[:half], reversed(circle[half:]), strict=True)
        turns.append([(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [sorted(turn) for turn in turns if turn]


def ranks_of(pair: Pair, ranks_by_node: Mapping[str, Sequence[int]]) -> list[int]:
    return sorted({rank for node in pair for rank in ranks_by_node[node]})
