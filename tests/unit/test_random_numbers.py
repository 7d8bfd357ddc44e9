"""The tests' own random numbers: nobody seeds those of another test."""

from __future__ import annotations

import random

import pytest

_drawn: list[float] = []


@pytest.mark.parametrize("turn", [1, 2])
def test_what_a_test_seeds_ends_with_it(turn: int) -> None:
    """What is drawn before a seed is not what another test has drawn after the same one."""
    fresh = random.random()
    random.seed(1)
    assert fresh not in _drawn
    _drawn.append(random.random())
    random.seed(1)
