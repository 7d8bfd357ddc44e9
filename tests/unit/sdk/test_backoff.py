"""Waits between tries grow to a limit, and begin anew after a success."""

from __future__ import annotations

import random

from trainmedic.wire.backoff import Backoff


def test_waits_double_up_to_the_longest() -> None:
    """The limit is reached and never passed."""
    backoff = Backoff(0.1, 0.5)
    assert [backoff.next() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_a_success_begins_anew() -> None:
    """After `reset` the first wait comes again."""
    backoff = Backoff(1.0, 60.0)
    backoff.next()
    backoff.next()
    backoff.reset()
    assert backoff.next() == 1.0


def test_jitter_spreads_waits_over_their_second_half() -> None:
    """Jobs that lost the same server come back at different times, and none sooner than half the wait."""
    waits = [Backoff(2.0, 2.0, jitter=True).next() for _ in range(200)]
    assert all(1.0 <= wait <= 2.0 for wait in waits)
    assert max(waits) - min(waits) > 0.5


def test_the_shared_random_generator_is_left_alone() -> None:
    """A training that was seeded draws the same numbers whether or not a connection failed meanwhile."""
    random.seed(7)
    expected = random.random()
    random.seed(7)
    Backoff(1.0, 2.0, jitter=True).next()
    assert random.random() == expected
