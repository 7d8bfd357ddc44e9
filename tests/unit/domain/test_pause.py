"""Pauses: whom they cover, and when they are in force."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from trainmedic_server.domain.pause import OperatorPause, Scope

AT = datetime(2026, 2, 1, 6, tzinfo=UTC)
HOUR = timedelta(hours=1)
WEEKLY = OperatorPause("p1", "ann", AT, AT, AT + 4 * HOUR, timedelta(days=7), Scope(node="rack3-*"), "firmware")


@pytest.mark.parametrize(
    ("scope", "covered"),
    [
        (Scope(), True),
        (Scope(playbook="gpu-*"), True),
        (Scope(playbook="node-*"), False),
        (Scope(node="node-7"), True),
        (Scope(node="node-8"), False),
        (Scope(job="llm-*"), True),
        (Scope(job="llm-2"), False),
        (Scope(labels={"rack": "r3"}), True),
        (Scope(labels={"rack": "r3", "severity": "warning"}), False),
        (Scope(node="node-7", playbook="gpu-hot"), True),
        (Scope(node="node-7", playbook="gpu-cold"), False),
    ],
)
def test_a_pause_covers_the_runs_for_which_all_that_is_given_holds(scope: Scope, covered: bool) -> None:
    """One without a scope covers all."""
    assert scope.covers("gpu-hot", {"node-6", "node-7"}, {"llm-1"}, {"rack": "r3"}) is covered


@pytest.mark.parametrize(
    ("hours", "in_force", "until"),
    [
        (-1, True, 4),  # the clock was set back to before the order, which began at once
        (0, True, 4),
        (3.9, True, 4),
        (4, False, 172),
        (167, False, 172),
        (168, True, 172),
        (172, False, 340),
    ],
)
def test_a_window_comes_again(hours: float, in_force: bool, until: int) -> None:
    """Its end is its own no more."""
    now = AT + hours * HOUR
    assert (WEEKLY.is_in_force(now), WEEKLY.until(now), WEEKLY.is_over(now)) == (in_force, AT + until * HOUR, False)


def test_a_pause_that_does_not_recur_is_over_at_its_end() -> None:
    """One without an end never is."""
    once = OperatorPause("p1", "ann", AT, AT + HOUR, AT + 2 * HOUR)
    assert [once.is_in_force(AT + hours * HOUR) for hours in (0, 1, 2)] == [False, True, False]
    assert [once.is_over(AT + hours * HOUR) for hours in (0, 1, 2)] == [False, False, True]
    assert not OperatorPause("p1", "ann", AT, AT).is_over(AT + 10_000 * HOUR)


def test_a_pause_is_kept_as_it_was() -> None:
    """With everything that it says."""
    assert OperatorPause.of_data(WEEKLY.as_data()) == WEEKLY
    assert WEEKLY.why(AT) == "paused by ann for node rack3-* until 2026-02-01 10:00:00Z: firmware"
