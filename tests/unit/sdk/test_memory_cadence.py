"""How often a copy is made, and which of them are kept."""

from __future__ import annotations

import pytest

from trainmedic.recovery.memory_cadence import MemoryCadence, budget_per_step, dispensable


@pytest.mark.parametrize(("step", "share"), [(0.001, 0.008), (0.01, 0.008), (0.1, 0.0015), (2.0, 0.0015)])
def test_a_step_may_be_held_up_by_a_part_of_its_time(step: float, share: float) -> None:
    """Under 1 % at 10 ms, and under 0.2 % at 100 ms, with room for the rest of what the SDK does."""
    assert budget_per_step(step) == pytest.approx(step * share)
    assert budget_per_step(step, 0.05) == pytest.approx(step * 0.05)


def test_what_a_copy_costs_decides_how_often() -> None:
    """On average it stays within the budget; and never more often than was asked for."""
    cadence = MemoryCadence(4)
    assert cadence.adapt(0.010, 0.1)
    assert cadence.interval == 68  # the first multiple of 4 from 10 ms / 0.15 ms on
    assert cadence.next_due(67) == 68
    assert cadence.next_due(68) == 136
    assert cadence.adapt(0.0001, 0.1)
    assert cadence.interval == 4


def test_small_changes_of_the_cost_change_nothing() -> None:
    """So that copies go on to be made at the same steps on all ranks, and those kept belong together."""
    cadence = MemoryCadence(None)
    assert cadence.adapt(0.015, 0.1)
    interval = cadence.interval
    for cost in (0.014, 0.011, 0.009):
        assert not cadence.adapt(cost, 0.1)
        assert cadence.interval == interval
    assert cadence.adapt(0.016, 0.1)
    assert cadence.interval > interval


def test_copies_to_other_nodes_are_of_steps_that_are_copied_at_all() -> None:
    cadence = MemoryCadence(10, replica_every=5.0)
    assert cadence.replica_steps == 0
    cadence.space_replicas(0.1, 0.0)
    assert cadence.replica_steps == 50
    cadence.space_replicas(0.1, 6.0)  # it takes six seconds to get there
    assert cadence.replica_steps == 240


def test_what_is_kept_reaches_back_in_growing_distances() -> None:
    """With a copy every step and four kept, one is some steps old, and one much older, at any time."""
    kept: list[int] = []
    for step in range(1, 401):
        if len(kept) == 5:
            kept.remove(dispensable([*kept, step], 200))
        kept.append(step)
        if step > 200:
            ages = [step - each for each in kept]
            assert ages[-1] == 0
            assert ages[0] <= 201
            assert any(2 <= age <= 60 for age in ages), ages
    assert kept == sorted(kept)


def test_the_newest_stays_whatever_there_is() -> None:
    assert dispensable([3, 9], 0) == 3
    assert dispensable([9], 0) == 9
    assert dispensable([1, 2, 3], 0) == 2
    assert dispensable([1, 2, 3], 1) == 1
