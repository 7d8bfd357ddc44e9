"""The times of a job's steps: how long they take, what they go into, and from when on a stall is a hang."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.unit.sdk.test_progress import reported
from trainmedic.job.pace import StepParts
from trainmedic.job.progress import Progress


def steady(every: float = 1.0, count: int = 10, **floors: float) -> Progress:
    """So many steps at that pace; the last at ``every * (count - 1)``."""
    progress = Progress(0.0, **floors)
    for number in range(count):
        progress.add_report(number, 1.0, None, None, 8, number * every)
    return progress


# --- windows --------------------------------------------------------------------------------------------


def test_time_in_a_window_is_no_step_time() -> None:
    """A checkpoint of a minute between two steps of a second."""
    progress = steady()
    progress.enter("checkpoint", 9.5)
    progress.leave(69.5)
    progress.add_report(10, 1.0, None, None, 8, 70.0)
    values = progress.values(70.0)
    assert values["training_step_seconds"] == pytest.approx(1.0)
    assert values["training_throughput_samples_per_second"] == pytest.approx(8.0)
    assert progress.seconds_in_windows(70.0)["checkpoint"] == pytest.approx(60.0)


def test_windows_nest_and_each_second_counts_once() -> None:
    """The innermost gets it; a name that is not known is another one."""
    progress = steady()
    progress.enter("evaluation", 10.0)
    progress.enter("saving the best model", 20.0)
    assert progress.window == "other"
    progress.leave(50.0)
    assert (progress.window, progress.seconds_in_windows(55.0)["evaluation"]) == ("evaluation", pytest.approx(15.0))
    progress.leave(60.0)
    found = progress.seconds_in_windows(99.0)
    assert (found["evaluation"], found["other"], progress.window) == (pytest.approx(20.0), pytest.approx(30.0), None)
    progress.add_report(10, 1.0, None, None, 8, 61.0)
    assert progress.values(61.0)["training_step_seconds"] == pytest.approx(1.2, abs=0.21)


def test_a_report_within_a_window_splits_it() -> None:
    """What was excused for the step before is not excused once more."""
    progress = steady()
    progress.enter("evaluation", 10.0)
    progress.add_report(10, 1.0, None, None, 8, 20.0)
    progress.leave(30.0)
    assert progress.stall(31.0).seconds == pytest.approx(1.0)


# --- hangs ----------------------------------------------------------------------------------------------


def test_a_stall_is_a_hang_from_five_times_the_usual_step_on() -> None:
    """Twenty seconds a step: a hundred seconds are not too long."""
    progress = steady(every=20.0)
    assert progress.stall(180.0 + 99).is_hang is False
    assert progress.stall(180.0 + 101).is_hang is True


def test_a_quick_loop_has_the_floor() -> None:
    """Fifty milliseconds a step: a quarter of a second is no hang, a minute is."""
    progress = steady(every=0.05)
    assert progress.stall(0.45 + 59) == (59.0, 60.0)
    assert progress.stall(0.45 + 61).is_hang is True


def test_the_floors_can_be_set() -> None:
    """For a job whose steps are quick and whose storage is too."""
    progress = steady(every=0.05, hang_floor=2.0, startup_floor=30.0)
    assert progress.stall(0.45 + 2.1).is_hang is True


def test_a_report_every_hundred_steps_is_waited_for() -> None:
    """The usual time between reports counts, not that of a step."""
    progress = Progress(0.0)
    for number in range(10):
        progress.add_report(100 * number, 1.0, None, None, None, 50.0 * number)
    assert progress.stall(450.0 + 240).is_hang is False


def test_a_few_slow_steps_do_not_stretch_the_limit() -> None:
    """It is the median that counts."""
    progress = steady(every=20.0, count=60)
    for number in range(5):
        progress.add_report(60 + number, 1.0, None, None, 8, 1180.0 + 600 * (number + 1))
    assert progress.stall(4180.0).limit == pytest.approx(100.0)


def test_a_job_that_starts_has_time() -> None:
    """Before its first step, and until it has a pace: the first steps compile."""
    assert Progress(100.0).stall(100.0 + 1700).is_hang is False
    assert Progress(100.0).stall(100.0 + 1900).is_hang is True
    assert steady(every=1.0, count=3).stall(1000.0).is_hang is False


def test_a_window_is_no_hang_for_half_an_hour() -> None:
    """A long evaluation is left alone; a checkpoint that never comes back is found."""
    progress = steady()
    progress.enter("checkpoint", 9.0)
    assert progress.stall(9.0 + 1700) == (0.0, 60.0)
    assert progress.stall(9.0 + 1900).is_hang is True


def test_a_pause_is_no_hang_however_long() -> None:
    """It was asked for, and ends by itself: a rollback of a paused job would be a mistake."""
    progress = steady()
    progress.enter("pause", 9.0)
    assert progress.stall(9.0 + 86_400) == (0.0, 60.0)
    progress.leave(9.0 + 86_400)
    assert progress.stall(9.0 + 86_400 + 61).is_hang is True


# --- what a step's time goes into -----------------------------------------------------------------------


def parts_of(*reports: dict[str, Any]) -> StepParts:
    return reported(*({"step": number, **one} for number, one in enumerate(reports))).pace.parts()


def test_a_ranks_own_time_is_that_of_a_step() -> None:
    """The median of the last few, also where a report covers several steps."""
    progress = Progress(0.0)
    for number in range(30):
        progress.add_report(10 * number, 1.0, None, None, None, number, own_seconds=4.0 if number != 20 else 400.0)
    assert progress.pace.parts().own == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("report", "parts"),
    [
        ({}, (None, None, None, None)),
        ({"wait_seconds": 0.25}, (0.75, None, None, 0.25)),
        ({"own_seconds": 0.75}, (0.75, None, None, 0.25)),
        ({"data_seconds": 0.5}, (None, 0.5, None, None)),
        ({"data_seconds": 0.5, "wait_seconds": 0.25}, (0.75, 0.5, 0.25, 0.25)),
        ({"data_seconds": 0.5, "own_seconds": 0.75, "wait_seconds": 0.1}, (0.75, 0.5, 0.25, 0.1)),
        ({"wait_seconds": 3.0, "data_seconds": 0.5}, (0.0, 0.5, 0.0, 3.0)),
        ({"wait_seconds": math.nan, "data_seconds": "long"}, (None, None, None, None)),
    ],
)
def test_own_time_and_waiting_follow_from_each_other(report: dict[str, Any], parts: tuple[float | None, ...]) -> None:
    """Of steps of a second; what is not known is not guessed, and nothing is below 0."""
    assert parts_of(*[report] * 4) == parts


def test_parts_are_per_step_and_their_median() -> None:
    """A report of ten steps has ten times as much; one long step moves nothing."""
    progress = reported(
        *({"step": 10 * number, "wait_seconds": 5.0 if number == 7 else 1.0} for number in range(20)), every=5.0
    )
    assert progress.pace.parts() == (pytest.approx(0.4), None, None, pytest.approx(0.1))
