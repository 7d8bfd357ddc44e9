"""Which nodes are measured with each other, and when."""

from __future__ import annotations

import itertools

import pytest

from trainmedic.probe.running import ranks_of, rounds


@pytest.mark.parametrize("count", range(1, 14))
def test_each_two_nodes_meet_once_and_no_node_is_in_two_pairs_at_a_time(count: int) -> None:
    """In as few rounds as there can be: one fewer than nodes, or as many where their number is odd."""
    nodes = [f"node-{number:02}" for number in range(count)]
    turns = rounds({node: [number] for number, node in enumerate(nodes)})
    assert sorted(pair for turn in turns for pair in turn) == list(itertools.combinations(nodes, 2))
    for turn in turns:
        busy = [node for pair in turn for node in pair]
        assert len(busy) == len(set(busy))
    assert len(turns) == (count - 1 if count % 2 == 0 else count if count > 1 else 0)


def test_nodes_with_several_ranks_are_measured_by_themselves_first() -> None:
    """One with a single rank has nothing to measure within it."""
    by_node = {"b": [2, 3], "a": [0], "c": [1, 4]}
    turns = rounds(by_node)
    assert turns[0] == [("b", "b"), ("c", "c")]
    assert ranks_of(("b", "b"), by_node) == [2, 3]
    assert ranks_of(("b", "c"), by_node) == [1, 2, 3, 4]
