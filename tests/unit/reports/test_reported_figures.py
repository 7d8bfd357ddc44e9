"""Figures from presences: bounded, by time, and only what is a number."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.clocks import START, ManualClock
from trainmedic_server.ports.metric_history import MetricSeries
from trainmedic_server.ports.outside import Presence
from trainmedic_server.reports import curves, reported_figures
from trainmedic_server.reports.curves import Source
from trainmedic_server.reports.reported_figures import LONGEST_PERIOD, MOST_POINTS, FigureSeries, ReportedFigures

HOUR = timedelta(hours=1)
BEGAN = START.timestamp()


class Reporting:
    """Presences as a test sets them."""

    def __init__(self) -> None:
        self.listed_jobs: list[Presence] = []
        self.listed_agents: list[Presence] = []

    async def jobs(self) -> list[Presence]:
        return self.listed_jobs

    async def agents(self) -> list[Presence]:
        return self.listed_agents

    async def launchers(self) -> list[Presence]:
        return []

    def notices(self) -> Sequence[Any]:
        return ()

    def discard_notices(self, entries: Any) -> None:
        """Nothing arrives."""


def loss_at(minute: float, loss: Any, job: str = "llm-1", **more: Any) -> Presence:
    at = START + timedelta(minutes=minute)
    return Presence(job, at, {"losses": {"median": loss}, **more})


@given(st.lists(st.tuples(st.floats(0.1, 5000), st.floats(-100, 100) | st.none()), max_size=400))
def test_a_series_is_bounded_in_order_and_within_its_values(reports: list[tuple[float, float | None]]) -> None:
    """Whatever the pace; its newest value is in the last point."""
    series, at = FigureSeries(1), BEGAN
    for seconds, value in reports:
        at += seconds
        series.add(at, [value])
    points = series.points(0, 0, math.inf)
    times = [when for when, _ in points]
    assert times == sorted(set(times))
    assert len([value for _, value in points if value is not None]) <= MOST_POINTS
    known = [value for _, value in reports if value is not None]
    for _, value in points:
        assert value is None or min(known) - 1e-9 <= value <= max(known) + 1e-9
    assert not points or times[-1] <= at < times[-1] + LONGEST_PERIOD


def test_points_are_merged_until_the_record_is_ten_hours_long_then_the_oldest_go() -> None:
    """A job that reports each 5 s has fine points at first, and never more than the limit."""
    series = FigureSeries(1)
    for number in range(120):
        series.add(BEGAN + 5 * number, [float(number)])
    assert [value for _, value in series.points(0, 0, math.inf)] == list(range(120))
    series.add(BEGAN + 600, [120.0])
    assert [value for _, value in series.points(0, 0, math.inf)][:3] == [0.5, 2.5, 4.5]
    for number in range(121, 12 * 60 * 12):
        series.add(BEGAN + 5 * number, [float(number)])
    points = series.points(0, 0, math.inf)
    assert len(points) == MOST_POINTS
    assert points[-1][0] - points[0][0] == (MOST_POINTS - 1) * LONGEST_PERIOD


def test_a_pause_is_a_gap_and_an_older_report_is_skipped() -> None:
    """No line is drawn over what no one reported."""
    series = FigureSeries(1)
    for second in (0, 15, 600, 590):
        series.add(BEGAN + second, [1.0])
    assert [value for _, value in series.points(0, 0, math.inf)] == [1, 1, None, 1]
    assert series.points(0, BEGAN + 900, BEGAN + 1000) == ()


def test_huge_figures_have_a_mean() -> None:
    """Their sums and differences have none; one such job would end the reading of all others."""
    series = FigureSeries(1)
    for number in range(300):
        series.add(BEGAN + number, [1.7e308 if number % 2 else -1.7e308])
        series.add(BEGAN + 1000 + 5 * number, [1.7e308])
    assert all(value is None or math.isfinite(value) for _, value in series.points(0, 0, math.inf))


async def test_only_numbers_of_trusted_presences_count() -> None:
    """Anything can be in a presence; a NaN loss is a gap."""
    source, clock = Reporting(), ManualClock(START)
    reported = ReportedFigures(source, clock)
    odd: list[Any] = [2.0, "1", None, True, math.nan, math.inf, 10**400, [1]]
    for minute, loss in enumerate([*odd, 1.0]):
        clock.time = START + timedelta(minutes=minute)
        source.listed_jobs = [loss_at(minute, loss, step="x", checkpoint={"step": 1, "at": "nonsense"})]
        await reported.look()
    curves = reported.of_job("llm-1", START, clock.time, "why")
    assert curves is not None
    assert [value for _, value in curves.curves[0].points if value is not None] == [2, 1]
    assert (curves.checkpoint, curves.source, curves.not_prometheus) == (None, Source.REPORTS, "why")
    doubtful = [Presence("llm-2", START, {}, doubt="it is forged", claims={"losses": {"median": 1.0}})]
    source.listed_jobs, source.listed_agents = doubtful, doubtful
    await reported.look()
    assert reported.of_job("llm-2", START - HOUR, clock.time, "why") is None


@pytest.mark.parametrize("details", [{"losses": 3}, {"checkpoint": 7}, {"checkpoint": {"at": 5}}, {"losses": []}, {}])
async def test_odd_presences_take_nothing_down(details: dict[str, Any]) -> None:
    """And give no curve."""
    source = Reporting()
    source.listed_jobs = [Presence("llm-1", START, details)]
    source.listed_agents = [
        Presence("node-1", START, {"gpus": each, "gpu_readings": each}) for each in (3, [3], [{"uuid": 3}], [{}], {})
    ]
    reported = ReportedFigures(source, ManualClock(START))
    await reported.look()
    curves = reported.of_job("llm-1", START - HOUR, START, "why")
    assert curves is not None
    assert (curves.curves, curves.checkpoint) == ((), None)
    assert curves.unknown == "the job reported no loss, throughput or learning rate in that time"
    assert reported.of_node("node-1", START - HOUR, START, "why") is None


async def test_jobs_in_use_are_not_displaced_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is silent longest makes room; while all report, a further one has none."""
    monkeypatch.setattr(reported_figures, "MOST_JOBS", 2)
    source, clock = Reporting(), ManualClock(START)
    reported = ReportedFigures(source, clock)
    source.listed_jobs = [loss_at(0, 1.0, job) for job in ("a", "b", "c")]
    await reported.look()
    assert reported.of_job("c", START - HOUR, START, "why") is None
    clock.time = START + timedelta(minutes=2)
    source.listed_jobs = [loss_at(2, 1.0, job) for job in ("b", "c")]
    await reported.look()
    found = [job for job in "abc" if reported.of_job(job, START - HOUR, clock.time, "why") is not None]
    assert found == ["b", "c"]


async def test_readings_of_a_silent_agent_are_not_shown() -> None:
    """After five minutes."""
    source, clock = Reporting(), ManualClock(START)
    reported = ReportedFigures(source, clock)
    readings = [{"uuid": "GPU-1", "temperature_celsius": 71}]
    source.listed_agents = [Presence("node-1", START, {"gpu_readings": readings})]
    await reported.look()
    found = reported.of_node("node-1", START - HOUR, START, "why")
    assert found is not None
    assert (found.gpus[0].temperature_celsius, found.reported_since) == (71, START)
    assert reported.of_node("node-1", START - HOUR, START + timedelta(minutes=6), "why") is None


async def test_a_clock_ahead_counts_as_now() -> None:
    """A job without a signature may claim any time."""
    source = Reporting()
    source.listed_jobs = [loss_at(60 * 24 * 365, 1.0)]
    reported = ReportedFigures(source, ManualClock(START))
    await reported.look()
    curves = reported.of_job("llm-1", START - HOUR, START, "why")
    assert curves is not None
    assert curves.reported_since == START


def test_the_record_of_a_job_is_as_small_as_stated() -> None:
    """MOST_JOBS of them fit in a few MB."""
    series = FigureSeries(4)
    for number in range(10_000):
        series.add(datetime(2026, 1, 1, tzinfo=UTC).timestamp() + 15 * number, [1.0, 2.0, 3.0, 4.0])
    size = sum(map(sys.getsizeof, (series._starts, *series._means)))
    assert size < 8_000


async def test_a_checkpoint_of_an_impossible_time_hides_no_curve() -> None:
    """Anything may expose a metric of that name."""

    class History:
        async def read(self, query: str, begin: datetime, end: datetime, every: timedelta) -> list[MetricSeries]:
            value = 1e20 if "checkpoint_timestamp" in query else 2.0
            return [MetricSeries({}, [(end.timestamp(), value)])]

    found = await curves.of_job(History(), "llm-1", START - HOUR, START)
    assert found.curves
    assert found.checkpoint is None
