"""What is said of a metric before and after an act."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest

from trainmedic_server.domain.effect import Effect, EffectVerdict, measured
from trainmedic_server.domain.promql import NOT_A_NUMBER, Comparison

ACT = datetime(2026, 3, 1, 12, tzinfo=UTC)
HOT = Comparison("temp", ">", 85.0)


def of(
    before: float, at: float, after: float, comparison: Comparison | None = None, better: str | None = None
) -> Effect:
    """The effect of a metric that was `before` until two minutes before the act, then `at`, and after it `after`."""
    act = ACT.timestamp()
    points = [
        (act + seconds, before if seconds < -120 else at if seconds <= 0 else after) for seconds in range(-600, 601, 30)
    ]
    return measured(Effect("r", "cool", ACT, ACT, better=better), points, comparison)


@pytest.mark.parametrize(
    ("at", "after", "comparison", "better", "verdict"),
    [
        (88, 84.9, HOT, None, EffectVerdict.HELPED),
        (88, 86, HOT, None, EffectVerdict.NO_CHANGE),
        (70, 60, HOT, None, EffectVerdict.NO_CHANGE),
        (88, 99, HOT, None, EffectVerdict.WORSE),
        (80, 86, HOT, None, EffectVerdict.WORSE),
        (0, 1, Comparison("up", "==", 0.0), None, EffectVerdict.HELPED),
        (math.nan, 2.0, Comparison("loss", NOT_A_NUMBER, None), None, EffectVerdict.HELPED),
        (math.nan, math.nan, Comparison("loss", NOT_A_NUMBER, None), None, EffectVerdict.NO_CHANGE),
        (4.5, 2.0, Comparison("loss", ">", None), None, EffectVerdict.HELPED),
        (4.5, 4.3, Comparison("loss", ">", None), None, EffectVerdict.NO_CHANGE),
        (2.0, 4.5, Comparison("loss", ">", None), None, EffectVerdict.WORSE),
        (100, 200, None, "higher", EffectVerdict.HELPED),
        (0, 0, None, "higher", EffectVerdict.NO_CHANGE),
        (0, 5, None, "lower", EffectVerdict.WORSE),
        (1, 5, None, None, EffectVerdict.NOT_MEASURED),
        (math.nan, 5, None, "lower", EffectVerdict.NOT_MEASURED),
        (math.nan, 5, HOT, None, EffectVerdict.NOT_MEASURED),
    ],
)
def test_the_verdict_is_by_the_alerts_condition_else_by_a_tenth(
    at: float, after: float, comparison: Comparison | None, better: str | None, verdict: EffectVerdict
) -> None:
    """Helped: the condition held and holds no more. Without a number to compare with: a tenth of the larger value."""
    effect = of(1.0, at, after, comparison, better)
    assert (effect.verdict, effect.due_at, effect.before) == (verdict, None, 1.0)
    assert effect.reason
    assert len(effect.series) == 41


def test_nothing_is_claimed_without_a_value_at_the_act_and_one_after() -> None:
    """Whatever the other points are."""
    act = ACT.timestamp()
    due = Effect("r", "cool", ACT, ACT)
    only_before = measured(due, [(act - 30, 88.0)], HOT)
    only_after = measured(due, [(act + 600, 70.0), (act + 30, 80.0), (act - 300, 90.0)], HOT)
    assert (only_before.verdict, only_before.reason) == (
        EffectVerdict.NOT_MEASURED,
        "the metric had no value 10 minutes after the act",
    )
    assert (only_after.verdict, only_after.reason, only_after.after) == (
        EffectVerdict.NOT_MEASURED,
        "the metric had no value at the act",
        70.0,
    )
    assert measured(due, [], HOT).verdict is EffectVerdict.NOT_MEASURED
