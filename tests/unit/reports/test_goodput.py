"""Where a job's time went, in virtual time: an interval is a minute."""

from __future__ import annotations

import pytest

from trainmedic_server.ports.metric_history import Points
from trainmedic_server.reports.goodput import Goodput, JobMoments, ProgressPoints, goodput
from trainmedic_server.reports.points import Stretch

EVERY = 60.0
HOUR = 3600.0


def minutes(first: int, last: int, value: float = 1.0) -> Points:
    """Points at the ends of these minutes."""
    return [(EVERY * number, value) for number in range(first, last + 1)]


def lost_of(progress: ProgressPoints, moments: JobMoments = JobMoments(), end: float = HOUR) -> Goodput:
    made = goodput(progress, moments, 0.0, end, EVERY)
    assert made is not None
    return made


def test_a_job_that_only_trains_loses_nothing() -> None:
    """From its first to its last minute."""
    made = lost_of(ProgressPoints(steps=minutes(1, 60)))
    assert (made.ratio, made.wall_seconds, made.lost.total) == (1.0, HOUR, 0)


def test_one_that_was_not_there_has_no_goodput() -> None:
    """Rather than one of 0 or 1."""
    assert goodput(ProgressPoints(steps=()), JobMoments(), 0, HOUR, EVERY) is None


@pytest.mark.parametrize(
    ("moments", "failures", "restarts", "wall"),
    [
        (JobMoments(failed=[1200]), 600, 0, HOUR),
        (JobMoments(), 0, 600, HOUR),
        (JobMoments(ended=[1200]), 0, 0, HOUR - 600),
        (JobMoments(failed=[1200], ended=[1300]), 0, 0, HOUR - 600),
        (JobMoments(failed=[3000]), 600 - 600, 600, HOUR),
    ],
    ids=["it failed", "nobody said why", "it ended", "a person said that it was meant", "it failed later"],
)
def test_a_gap_is_what_was_told_of_it(moments: JobMoments, failures: float, restarts: float, wall: float) -> None:
    """Down by a failure, or for a restart; and no lost time where the job had ended as it should."""
    made = lost_of(ProgressPoints(steps=[*minutes(1, 20), *minutes(31, 60)]), moments)
    assert (made.lost.failures, made.lost.restarts, made.wall_seconds) == (failures, restarts, wall)


def test_a_restart_that_is_too_short_for_a_gap_counts_as_it_was_told() -> None:
    """A launcher has the job back within an interval, so no interval is empty; and what was starting then is not
    counted again. What would have shown as a gap, and did not, is not believed; nor is one counted beside its gap."""
    quick = JobMoments(failed=[1210, 2410], restarted=[Stretch(1210, 1240), Stretch(2410, 2500)])
    steps = [*minutes(1, 20), *minutes(21, 21, 0.0), *minutes(22, 60)]
    lost = lost_of(ProgressPoints(steps=steps), quick).lost
    assert (lost.failures, lost.restarts) == (30 + 90, 60 - 30)
    unseen = JobMoments(failed=[1210], restarted=[Stretch(1210, 1210 + 2 * EVERY)])
    assert lost_of(ProgressPoints(steps=minutes(1, 60)), unseen).lost.total == 0
    gap = ProgressPoints(steps=[*minutes(1, 20), *minutes(22, 60)])
    assert lost_of(gap, JobMoments(failed=[1200], restarted=[Stretch(1200, 1290)])).lost.failures == 60


def test_a_job_that_is_still_down_goes_on_losing_time() -> None:
    """Until the end of the time that is asked for; one that ended does not, nor one of which nothing is told."""
    steps = ProgressPoints(steps=minutes(1, 30))
    assert lost_of(steps, JobMoments(failed=[1800])).lost.failures == 1800
    assert lost_of(steps, JobMoments(ended=[1800])).wall_seconds == 1800
    assert lost_of(steps).wall_seconds == 1800


def test_time_that_nobody_measured_counts_for_nothing() -> None:
    """Prometheus was away: neither the job nor anything else has points."""
    there = [*minutes(1, 20), *minutes(31, 60)]
    made = lost_of(ProgressPoints(steps=there, measured=[Stretch(0, 1200), Stretch(1800, HOUR)]))
    assert (made.lost.total, made.wall_seconds, made.unmeasured_seconds) == (0, HOUR - 600, 600)


def test_a_start_lasts_until_the_first_step() -> None:
    """Also where a stall is told meanwhile, which is not counted again."""
    steps = [*minutes(1, 10, 0.0), *minutes(11, 60)]
    stall = [(at, at) for at, _ in minutes(1, 10)]
    made = lost_of(ProgressPoints(steps=steps, stall=stall, stall_limit=minutes(1, 60, 100.0)))
    assert (made.lost.restarts, made.lost.stalls) == (600, 0)


def test_windows_are_told_by_kind_over_restarts_of_their_counter() -> None:
    """What a process had counted before the time in question is not of it."""
    windows = {
        "checkpoint": [*minutes(1, 20, 500.0), *minutes(21, 40, 560.0), *minutes(41, 60, 30.0)],
        "evaluation": minutes(30, 60, 7.0),
        "repair": [*minutes(1, 2, 0.0), *minutes(3, 60, 5.0)],
        "pause": [*minutes(1, 2, 0.0), *minutes(3, 60, 6.0)],
    }
    lost = lost_of(ProgressPoints(steps=minutes(1, 60), windows=windows)).lost
    assert (lost.checkpoints, lost.evaluations, lost.repairs) == (60 + 30, 7, 11)


def redone(step: Points, moments: JobMoments = JobMoments()) -> float:
    there = [(at, 1.0) for at, _ in step]
    return lost_of(ProgressPoints(steps=there, step=step, step_seconds=minutes(1, 60, 0.5)), moments).lost.redone


@pytest.mark.parametrize("rest", [0.0, 0.4, 0.6, 0.9999])
def test_a_window_from_before_the_period_is_not_lost_in_it(rest: float) -> None:
    """The last point is at the period's end. So the first is later by the rest of the period's length, in intervals."""
    progress = ProgressPoints(steps=minutes(1, 60), windows={"checkpoint": minutes(1, 60, 5000.0)})
    made = goodput(progress, JobMoments(), -rest * EVERY, HOUR, EVERY)
    assert made is not None
    assert made.lost.checkpoints == 0


def rising(first: int, last: int, begin: float) -> Points:
    """A hundred steps a minute."""
    return [(at, begin + 100.0 * number) for number, (at, _) in enumerate(minutes(first, last))]


def test_steps_that_had_to_be_done_again_are_lost() -> None:
    """After a rollback by 250 steps of half a second; a second one adds to it."""
    assert redone([*rising(1, 30, 1000), *rising(31, 60, 3650)]) == 125
    assert redone([*rising(1, 20, 1000), *rising(21, 40, 2650), *rising(41, 60, 4450)]) == 125 + 50


def test_steps_that_were_done_again_within_an_interval_are_lost_too() -> None:
    """The job was killed at step 300, begun again at 280, and at 430 when it was looked at next: its own count of steps
    tells, also where it went back without a restart."""
    step = [(60.0, 100.0), (120.0, 297.0), (180.0, 430.0)]
    for counts in ((100.0, 297.0, 150.0), (100.0, 297.0, 447.0)):
        steps = [(at, count) for (at, _), count in zip(step, counts, strict=True)]
        made = lost_of(ProgressPoints(steps=steps, step=step, step_seconds=minutes(1, 3, 0.5)))
        assert made.lost.redone == (150 - (430 - 297)) * 0.5


def test_steps_that_are_done_again_were_as_long_as_steps_were_then() -> None:
    """Not as long as on average: the job was slow for a time before."""
    step = [*rising(1, 30, 1000), *rising(31, 60, 3650)]
    seconds = [*minutes(1, 25, 5.0), *minutes(26, 60, 0.5)]
    made = lost_of(ProgressPoints(steps=minutes(1, 60), step=step, step_seconds=seconds))
    assert made.lost.redone == 125


def test_only_steps_of_this_time_are_lost_in_it() -> None:
    """A rollback to long before it throws away what was done before as well, which is not of it."""
    assert redone([*rising(1, 11, 10_000), *rising(12, 60, 0)]) == 500


def test_a_training_that_begins_anew_throws_nothing_away() -> None:
    """It had ended as it should, and the next one has its own steps."""
    course = [*rising(1, 20, 1000), *rising(31, 60, 0)]
    assert redone(course, JobMoments(ended=[1230])) == 0
    assert redone(course, JobMoments(failed=[1230])) == 950


def test_a_stall_under_the_limit_is_none() -> None:
    """The limit is the job's own, at that time; of a stall that is over it, all counts."""
    stall = [*minutes(1, 5, 50.0), (360, 70.0), (420, 130.0), *minutes(8, 60, 1.0)]
    made = lost_of(ProgressPoints(steps=minutes(1, 60), stall=stall, stall_limit=minutes(1, 60, 60.0)))
    assert made.lost.stalls == 130
