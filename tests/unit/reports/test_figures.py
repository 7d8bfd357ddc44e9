"""Efficiency, bottlenecks and anomalies: what the figures of a job come to."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest

from trainmedic_server.ports.metric_history import Points
from trainmedic_server.reports import points as figures
from trainmedic_server.reports.anomalies import BOUNDS, AnomalyRecord, anomalies
from trainmedic_server.reports.bottleneck import LogHints, MemoryUse, StepShares, Straggler, bottleneck, step_shares
from trainmedic_server.reports.efficiency import baseline, efficiency

BOUND = {bound.kind: bound for bound in BOUNDS}


def seconds(anomaly: AnomalyRecord) -> tuple[float, float]:
    return anomaly.since.timestamp(), anomaly.until.timestamp()


def each_minute(*values: float) -> Points:
    return [(60.0 * number, value) for number, value in enumerate(values, 1)]


# --- efficiency


@pytest.mark.parametrize(
    ("utilisation", "throughput", "score", "rating"),
    [
        (100, 100, 100, "excellent"),
        (100, 250, 100, "excellent"),
        (80, 80, 80, "excellent"),
        (79, 80, 79.4, "good"),
        (50, 75, 60, "good"),
        (40, 40, 40, "fair"),
        (30, 30, 30, "poor"),
        (0, 0, 0, "poor"),
    ],
)
def test_the_score_is_utilisation_and_throughput(
    utilisation: float, throughput: float, score: float, rating: str
) -> None:
    """At most 1 for a throughput above what is usual, which is 100 here."""
    made = efficiency(utilisation, throughput, 100)
    assert (made.score, made.rating) == (score, rating)


def test_the_baseline_is_the_first_stable_hour() -> None:
    """What scatters before it, and what comes after it, does not move it."""
    warming_up = [10.0 * number for number in range(30)]
    made = baseline(each_minute(*warming_up, *[300.0] * 90, *[50.0] * 600))
    assert made is not None
    assert (made.of, made.value) == ("first_stable_hour", 300)
    assert 20 * 60 <= made.since.timestamp() <= 40 * 60


@pytest.mark.parametrize("every", [75, 150, 300])
def test_an_hour_of_few_points_is_stable_too(every: int) -> None:
    """As with a Prometheus that scrapes every 30 s, each minute, or every two. Half an hour of pauses is no hour."""
    steady = [(float(every * number), 300.0) for number in range(20_000 // every)]
    made = baseline(steady)
    assert made is not None
    assert made.of == "first_stable_hour"
    made = baseline([point for point in steady if point[0] % 1800 < 900])
    assert made is not None
    assert made.of == "first_points"


def test_a_job_that_was_never_stable_is_held_against_its_first_points() -> None:
    """Fifty of them; what is no number, or nothing, is none of them. Of fewer than ten nothing is made."""
    scattering = [100.0 if number % 2 else 200.0 for number in range(300)]
    made = baseline(each_minute(math.nan, 0.0, *scattering))
    assert made is not None
    assert (made.of, made.value, made.points, made.since.timestamp()) == ("first_points", 150, 50, 180)
    assert baseline(each_minute(*scattering[:9])) is None


# --- bottleneck

FREE = MemoryUse()


@pytest.mark.parametrize(
    ("shares", "straggler", "kind", "severity"),
    [
        (StepShares(0.6, 0.35, 0.05), None, "data", "high"),
        (StepShares(0.4, 0.55, 0.05), None, "data", "medium"),
        (StepShares(0.05, 0.5, 0.45), Straggler("3", "node-2", 1.1), "communication", "medium"),
        (StepShares(0.05, 0.5, 0.45), Straggler("3", "node-2", 1.5), "straggler", "medium"),
        (StepShares(0.35, 0.3, 0.35), None, "mixed", "medium"),
        (StepShares(0.05, 0.85, 0.1), None, "compute", "low"),
        (StepShares(0.5, None, None), None, "data", "medium"),
    ],
)
def test_a_step_is_held_up_by_what_it_waits_for(shares, straggler, kind: str, severity: str) -> None:
    """One cause is named where it explains four fifths of the waiting."""
    made = bottleneck(shares, straggler, FREE, 1.0)
    assert made is not None
    assert (made.kind, made.severity) == (kind, severity)
    assert made.reasons
    assert bool(made.advice) == (kind != "mixed")


def test_where_waiting_is_not_measured_nothing_is_guessed() -> None:
    """Computing and communication look alike then; and without any shares all is unknown."""
    assert bottleneck(StepShares(0.1, None, None), None, FREE, 0.5) is None
    assert bottleneck(None, None, FREE, None) is None
    assert bottleneck(None, None, FREE, 0.9) is None


@pytest.mark.parametrize(
    ("shares", "unmeasured"),
    [(StepShares(0.5, 0.4, None), "waiting for other ranks"), (StepShares(None, 0.4, 0.5), "waiting for batches")],
)
def test_a_part_that_is_not_measured_is_not_told_as_none(shares: StepShares, unmeasured: str) -> None:
    made = bottleneck(shares, None, FREE, 1.0)
    assert made is not None
    assert f"{unmeasured} is not measured" in made.reasons[0]
    assert "0% waiting" not in made.reasons[0]
    assert "50% of a step is" in made.reasons[0]


def test_without_the_wait_for_batches_no_step_is_only_computing() -> None:
    assert bottleneck(StepShares(None, 0.4, 0.1), None, FREE, 1.0) is None


@pytest.mark.parametrize(("timeouts", "kind"), [(2, "communication"), (0, "data")])
def test_a_slow_job_without_shares_has_a_hint(timeouts: int, kind: str) -> None:
    """By the NCCL timeouts in its log, and never more than a hint."""
    made = bottleneck(None, None, FREE, 0.5, LogHints(timeouts))
    assert made is not None
    assert (made.kind, made.severity) == (kind, "low")
    assert "a hint" in made.reasons[0]


def test_shares_win_over_what_the_log_says() -> None:
    """They were measured."""
    made = bottleneck(StepShares(0.6, 0.3, 0.1), None, FREE, 0.5, LogHints(timeouts=3))
    assert made is not None
    assert made.kind == "data"
    assert bottleneck(StepShares(0.1, None, None), None, FREE, 0.5, LogHints(timeouts=3)) is None


def test_a_trainers_own_figures_count_without_shares() -> None:
    """Its log states how long it waits for data."""
    made = bottleneck(None, None, FREE, None, LogHints(timeouts=3, waits_for_data=True))
    assert made is not None
    assert (made.kind, made.severity) == ("data", "medium")


def test_memory_holds_up_a_job_that_is_slow_or_has_to_search_for_it() -> None:
    """Full memory alone does not: caches fill it on purpose."""
    computing = StepShares(0.0, 1.0, 0.0)
    full = MemoryUse(cuda=0.97)
    assert [made and made.kind for made in (bottleneck(computing, None, full, share) for share in (1.0, 0.6))] == [
        "compute",
        "memory",
    ]
    searching = bottleneck(None, None, MemoryUse(cuda=0.5, retries=3), 1.0)
    assert searching is not None
    assert (searching.kind, searching.severity) == ("memory", "medium")


def test_a_slow_job_that_only_computes_is_told_so() -> None:
    """Its GPUs may be slowed down."""
    made = bottleneck(StepShares(0.0, 1.0, 0.0), None, FREE, 0.5)
    assert made is not None
    assert (made.kind, made.severity) == ("compute", "medium")


def test_shares_are_of_the_parts_or_of_the_step() -> None:
    """Where all parts are known of their sum; else of the step's length; else there are none."""
    assert step_shares(0.2, 0.6, 0.2, 5.0) == StepShares(0.2, 0.6, 0.2)
    assert step_shares(0.5, None, None, 2.0) == StepShares(0.25, None, None)
    assert step_shares(0.5, None, None, None) is None
    assert step_shares(None, 0.5, None, 2.0) is None


# --- anomalies


def test_a_value_at_the_bound_is_none() -> None:
    """One above it is, until it is back; two times are two anomalies."""
    made = anomalies(BOUND["gradient_explosion"], each_minute(1, 100, 101, 240, 1, 101), 60)
    assert [(*seconds(each), each.worst) for each in made] == [(120, 240, 240), (300, 360, 101)]


def test_a_throughput_is_low_after_three_points() -> None:
    """Under 70 % of its mean. Two are a hiccup; the worst is the lowest."""
    usual = [100.0] * 50
    made = anomalies(BOUND["throughput_drop"], each_minute(*usual, 50, 50, *usual, 60, 40, 50, *usual), 60)
    assert [(each.worst, each.until - each.since) for each in made] == [(40, timedelta(seconds=180))]


def test_what_has_no_past_has_no_relative_bound() -> None:
    """Nine points say nothing of what is usual."""
    assert anomalies(BOUND["loss_unstable"], each_minute(*[0.1] * 8, 50), 60) == []
    (made,) = anomalies(BOUND["loss_unstable"], each_minute(*[0.1] * 20, 50), 60)
    assert (made.worst, made.limit) == (50, 0.5)


def test_a_loss_that_is_no_number_is_one_anomaly() -> None:
    """Without a worst value; an infinite one as well."""
    (made,) = anomalies(BOUND["loss_not_finite"], each_minute(1, math.nan, math.inf, 1), 60)
    assert (*seconds(made), made.worst, made.limit) == (60, 180, None, None)


def test_a_gap_ends_an_anomaly() -> None:
    """What was in between is not known."""
    made = anomalies(BOUND["gpu_hot"], [(60, 90), (120, 91), (600, 92)], 60)
    assert [seconds(each) for each in made] == [(0, 120), (540, 600)]


# --- points


def test_a_counter_rises_over_its_restarts() -> None:
    """And by its first value where it began within the time."""
    points = each_minute(5, 8, 2, 4)
    assert (figures.rise(points, is_from_zero=False), figures.rise(points, is_from_zero=True)) == (7, 12)
    assert figures.rise((), is_from_zero=True) == 0


def test_a_spread_is_of_numbers_alone() -> None:
    """With the extremes of the intervals where they are known; without any number there is none."""
    spread = figures.spread(each_minute(1, math.nan, 3), each_minute(9), each_minute(-1))
    assert spread == figures.Spread(2, 9, -1)
    assert figures.spread(each_minute(math.nan)) is None


def test_an_average_over_several_counts_by_how_many_there_were() -> None:
    """In the first minute one GPU was known, then four."""
    spread = figures.spread(each_minute(90, 70, 70), counts=each_minute(1, 4, 4))
    assert spread is not None
    assert spread.average == (90 + 4 * 70 + 4 * 70) / 9
