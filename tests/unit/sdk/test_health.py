"""What a checkpoint is judged by: a normal training is never called ill, and one that has come off its course is."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmedic.job.parameters import Rollback
from trainmedic.job.progress import Progress
from trainmedic.job.reported_values import ReportedValues
from trainmedic.recovery.health import FEWEST, CheckpointHealth, Onset, health_now, onset_of, problem, rise
from trainmedic.wire import envelope

Course = Callable[[int], float]

APART = 1 / 16
"""Seconds between two reports; exact in any sum, as a rounded one may fall below `TENSOR_INTERVAL`."""


def reports(losses: list[float], seconds: float = APART) -> list[ReportedValues]:
    return [ReportedValues(step, step * seconds, loss, None) for step, loss in enumerate(losses, 1)]


def reported(losses: list[float], norm: float | None = 1.0) -> Progress:
    """The progress of a job that has reported these losses, the last one now."""
    progress = Progress()
    now = time.perf_counter()
    for step, loss in enumerate(losses, 1):
        progress.add_report(step, loss, norm, None, None, now + (step - len(losses)) * APART)
    return progress


def noisy(length: int, mean: Course, noise: float, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [mean(step) * math.exp(draw.gauss(0, noise)) for step in range(length)]


COURSES: dict[str, Course] = {
    "falls from 11 to 2": lambda step: 2 + 9 * math.exp(-step / 60),
    "falls slowly": lambda step: 2 + 1 / (1 + step / 500),
    "stays": lambda step: 1.9,
    "rises slowly": lambda step: 1.5 + step / 1000,
    "is next to nothing": lambda step: 1e-4,
}


@pytest.mark.parametrize("mean", COURSES.values(), ids=COURSES)
@pytest.mark.parametrize("noise", [0.001, 0.02, 0.1])
def test_no_checkpoint_of_a_normal_training_is_unhealthy(mean: Course, noise: float) -> None:
    """In four trainings a noisy loss falls, stays or drifts; none has a rise either."""
    for seed in range(4):
        losses = noisy(400, mean, noise, seed)
        for step in range(1, 400, 7):
            found = health_now(reported(losses[max(step - 150, 0) : step]), finite=True)
            assert problem(found) == "", (seed, step)
        assert rise(reports(losses)) is None


@pytest.mark.parametrize("after", [1, 2, 10, 45])
def test_a_checkpoint_after_the_jump_is_unhealthy(after: int) -> None:
    """The loss is 4.13 against a median of 1.9, from the first step after the jump on."""
    losses = noisy(300, lambda step: 1.9, 0.05, 1) + [4.13] * after
    found = health_now(reported(losses), finite=True)
    assert 1.8 < (found.loss_median or 0) < 2.1
    assert "the loss was 4.13 when it was written, against a median of" in problem(found)


def test_few_reports_give_no_verdict() -> None:
    """With fewer than 20 the usual spread is unknown, and what is unknown is not unhealthy."""
    assert problem(health_now(reported([1.0] * (FEWEST - 2) + [100.0]))) == ""
    assert problem(health_now(reported([1.0] * FEWEST + [100.0]))) != ""
    assert problem(health_now(Progress())) == ""
    assert problem(CheckpointHealth()) == problem(None) == ""


@pytest.mark.parametrize(
    ("health", "words"),
    [
        (CheckpointHealth(finite=False), "not all finite"),
        (CheckpointHealth(loss=math.nan), "the loss was not a finite number"),
        (CheckpointHealth(1.0, 1.0, 0.1, 55.0, 5.0, 100), "the gradient norm was 55 when it was written"),
        (CheckpointHealth(1.0, 1.0, 0.1, 45.0, 5.0, 100), ""),
        (CheckpointHealth(1.0, 1.0, 0.1, math.nan, 5.0, 100, True), ""),  # a step that a gradient scaler left out
        (CheckpointHealth(-3.0, -5.0, 0.01, reports=100), "the loss was -3"),
        (CheckpointHealth(1e-9, 0.0, 0.0, reports=100), ""),
    ],
)
def test_each_sign_of_an_unhealthy_checkpoint(health: CheckpointHealth, words: str) -> None:
    """The healthy values next to them are no sign."""
    assert words in problem(health)
    assert bool(problem(health)) == bool(words)


def test_a_rate_off_its_schedule_is_unhealthy_until_it_has_lasted(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is five minutes, in which a user would have corrected it; after that it may be intended."""
    progress, now = Progress(), time.perf_counter()

    def health(rate: float, expected: float | None, after: float) -> CheckpointHealth:
        progress.add_report(1, 2.0, 1.0, rate, None, now, expected_learning_rate=expected)
        monkeypatch.setattr(time, "perf_counter", lambda: now + after)
        return health_now(progress)

    assert health(0.1, None, 0).on_schedule is None
    assert health(0.1, 0.104, 1).on_schedule is True
    jumped = health(3.0, 0.1, 2)
    assert (jumped.on_schedule, problem(jumped)) == (False, "the learning rate was off its schedule")
    assert health(3.0, 0.1, 301).on_schedule is False
    assert health(3.0, 0.1, 303).on_schedule is None
    assert health(0.1, 0.1, 304).on_schedule is True
    assert health(3.0, 0.1, 305).on_schedule is False


def test_another_training_of_the_process_is_not_judged_by_the_previous_one() -> None:
    progress = reported([4.0] * 2 * FEWEST)
    progress.add_report(100, 4.0, 1.0, 1e-7, None, time.perf_counter(), expected_learning_rate=1e-7)
    progress.begin_training(time.perf_counter())
    progress.add_report(1, 9.0, 1.0, 1e-3, None, time.perf_counter())
    assert health_now(progress) == CheckpointHealth(9.0, 9.0, 0.0, 1.0, 1.0, reports=1)


def test_a_non_finite_norm_is_kept_as_such() -> None:
    """JSON has no NaN, so it is a text there."""
    found = health_now(reported([2.0] * 30, norm=math.inf), finite=True)
    members = found.to_json()
    assert members["grad_norm"] == "nan"
    assert repr(CheckpointHealth.from_json(members)) == repr(found)


@given(
    st.builds(
        CheckpointHealth,
        *[st.none() | st.floats(allow_infinity=False)] * 5,
        reports=st.integers(0, 2000),
        **dict.fromkeys(("finite", "ranks_agree", "on_schedule"), st.none() | st.booleans()),
    )
)
def test_a_health_mark_survives_a_round_trip(health: CheckpointHealth) -> None:
    """It is equal to the bit, so that it is judged as before."""
    assert repr(CheckpointHealth.from_json(health.to_json())) == repr(health)


@pytest.mark.parametrize("members", [None, [], "x", {"loss": "high"}, {"loss": []}, {"reports": "many"}])
def test_unreadable_health_is_unknown(members: object) -> None:
    """The mark is of an earlier version, or damaged."""
    assert CheckpointHealth.from_json(members) is None


@settings(max_examples=60, deadline=None)
@given(
    before=st.integers(60, 400),
    after=st.integers(1, 300),
    noise=st.floats(0.001, 0.05),
    jump=st.floats(1.6, 50),
    seed=st.integers(0, 10_000),
)
def test_a_rise_starts_at_its_first_raised_loss(before: int, after: int, noise: float, jump: float, seed: int) -> None:
    """Its duration does not matter: at 20 reports/s, 6.9 s exceed the window of the usual level."""
    losses = noisy(before, lambda step: 1.9, noise, seed) + noisy(after, lambda step: 1.9 * jump, noise, seed + 1)
    begun = rise(reports(losses))
    assert begun is not None
    assert (
        before - 3 <= begun.step <= begun.shown_at <= before + 1
    )  # a raised one just before, by chance, may count to it


def test_a_slow_rise_counts_from_its_start() -> None:
    """The checkpoints in the middle of it are spoiled already."""
    flat = noisy(200, lambda step: 2.0, 0.01, 3)
    begun = rise(reports(flat + [2.0 + 0.05 * step for step in range(40)]))
    assert begun is not None
    assert 200 < begun.step < 210


def test_a_rise_that_is_over_does_not_count() -> None:
    """It was a single bad batch, long ago."""
    losses = noisy(300, lambda step: 1.9, 0.02, 5)
    losses[150] = math.nan
    losses[200] = 9.0
    assert rise(reports(losses)) is None


def test_a_higher_level_that_lasts_becomes_the_new_level() -> None:
    """Other data may cause it; a rollback is not to go back over all of it."""
    losses = noisy(200, lambda step: 1.9, 0.02, 5) + noisy(500, lambda step: 2.9, 0.02, 6)
    assert rise(reports(losses[:300], seconds=1.0)) == Onset(201, True, 201)
    assert rise(reports(losses, seconds=1.0)) is None
    assert rise(reports([*losses, 6.0, 6.0], seconds=1.0)) == Onset(701, True, 701)


def test_between_two_reports_there_may_be_many_steps() -> None:
    """The rise may have started at any of them; it is certain only where it was reported."""
    found = [ReportedValues(10 * number, number, 1.9 if number < 50 else 4.13, None) for number in range(1, 60)]
    assert rise(found) == Onset(491, True, 500)


def test_non_finite_losses_are_a_rise_by_themselves() -> None:
    """This holds even where no usual level is known."""
    assert rise(reports([2.0, math.nan, math.nan])) == Onset(2, True, 2)


def test_the_onset_is_the_rise_in_progress_when_the_alert_started() -> None:
    """It is not the alert's start, which was 6.9 s later, nor anything that has happened since then."""
    losses = noisy(400, lambda step: 1.9, 0.02, 5) + [4.13] * 200
    progress = reported(losses)
    alert = envelope.utc_now() - timedelta(seconds=APART * (200 - 138))
    assert onset_of(Rollback(before=alert), progress) == Onset(401, True, 401)
    assert onset_of(Rollback(), progress) == Onset(401, True, 401)


def test_without_a_rise_the_onset_is_the_step_at_the_alerts_start() -> None:
    """It is None where the record does not go back that far, or no time was given."""
    progress = reported(noisy(400, lambda step: 1.9, 0.02, 5))
    found = onset_of(Rollback(before=envelope.utc_now() - timedelta(seconds=APART * 100)), progress)
    assert found is not None
    assert not found.is_rise
    assert 295 <= found.step <= 305
    assert onset_of(Rollback(before=envelope.utc_now() - timedelta(hours=1)), progress) is None
    assert onset_of(Rollback(), progress) is None


FALLING: dict[str, Course] = {
    "exponentially": lambda step: 2 + 9 * math.exp(-step / 30),
    "by a power": lambda step: 12 * (step + 1) ** -0.4,
    "in a line": lambda step: 11 - 0.08 * step,
}


@pytest.mark.parametrize("mean", FALLING.values(), ids=FALLING)
@pytest.mark.parametrize("at", [30, 60, 110])
def test_a_tripling_on_a_falling_curve_is_a_fault(mean: Course, at: int) -> None:
    """The median of the last hundred is far above the curve, and so was the limit: a rollback landed in the spike."""
    for seed in range(10):
        losses = [*noisy(at, mean, 0.02, seed), *(3 * loss for loss in noisy(10, lambda step: mean(at), 0.02, seed))]
        found = rise(reports(losses))
        assert found is not None
        assert found.step == at + 1
        assert "the loss was" in problem(health_now(reported(losses)))
        assert rise(reports(losses[:at])) is None
        assert problem(health_now(reported(losses[:at]))) == ""


def test_the_spread_is_that_of_the_last_hundred_losses() -> None:
    """It is the median absolute deviation from their median, where they do not fall."""
    losses = noisy(500, lambda step: 5.0 + step / 100, 0.02, 9)
    found = health_now(reported(losses))
    last = losses[-100:]
    assert found.loss_median == statistics.median(last)
    assert found.loss_spread == statistics.median(abs(loss - statistics.median(last)) for loss in last)
    assert (found.reports, found.loss, found.grad_norm, found.grad_norm_median) == (100, losses[-1], 1.0, 1.0)
