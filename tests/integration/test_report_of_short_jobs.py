"""The reports of jobs that are short beside the time that is asked for, from a real Prometheus."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.past_prometheus import Past, prometheus_of
from trainmedic_server.adapters.prometheus_api import PrometheusApi
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.reports.compiling import ReportCompiler
from trainmedic_server.reports.job_report import JobReport
from trainmedic_server.reports.points import Spread

END = 6 * 3600.0
BEGIN = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=7)
YOUNG, BRIEF, EARLY = END - 1790, END - 240, 3600.0
"""From when on jobs were there, in seconds; the last one for five minutes."""
YEAR = 365 * 24 * 60
LONGEST_INTERVAL = 75.0
"""Seconds: two and a half scrapes, which lie 30 s apart."""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    past = Past(BEGIN, END)
    past.add("up", 1.0, job="trainmedic")
    past.add("training_steps_total", lambda after: after if after >= YOUNG else None, job_name="young")
    past.add("trainmedic_job_gpu", lambda after: 1.0 if after >= YOUNG else None, job_name="young", uuid="GPU-a")
    past.add("gpu_utilization_percent", lambda after: 95.0 if after >= YOUNG else 5.0, uuid="GPU-a", node="node-1")
    past.add("training_steps_total", lambda after: after if after > BRIEF else None, job_name="brief")
    past.add("training_steps_total", lambda after: after if EARLY <= after < EARLY + 300 else None, job_name="early")
    with prometheus_of(past, tmp_path_factory.mktemp("past")) as url:
        yield url


@pytest.fixture
async def compiler(prometheus: str) -> AsyncIterator[ReportCompiler]:
    api, store = PrometheusApi(prometheus), InMemoryStore()
    yield ReportCompiler(store, api)
    await api.close()
    await store.close()


async def report_of(compiler: ReportCompiler, job: str, minutes: float) -> JobReport:
    """On the last so many minutes."""
    end = BEGIN + timedelta(seconds=END)
    return await compiler.job(job, end - timedelta(minutes=minutes), end)


async def test_earlier_use_of_its_gpus_does_not_count_for_a_job(compiler: ReportCompiler) -> None:
    """Another user had worked on the GPU: even the interval in which the job started is excluded."""
    report = await report_of(compiler, "young", 360)
    assert report.gpus == 1
    assert report.gpu_utilization == Spread(95, 95, 95)


@pytest.mark.parametrize(
    ("job", "minutes", "seconds"),
    [
        ("brief", 5, 240),
        ("brief", 19, 240),
        ("brief", 25, 240),
        ("brief", 360, 240),
        ("early", 360, 300),
        ("early", YEAR, 300),
    ],
)
async def test_a_short_job_is_measured_in_short_intervals(
    compiler: ReportCompiler, job: str, minutes: float, seconds: float
) -> None:
    """It fills little of the long period requested; and the newest time is not left out if that
    is no whole number of intervals."""
    goodput = (await report_of(compiler, job, minutes)).goodput
    assert goodput is not None
    assert goodput.resolution_seconds <= LONGEST_INTERVAL
    assert goodput.wall_seconds == pytest.approx(seconds, abs=LONGEST_INTERVAL)
    assert (goodput.unmeasured_seconds, goodput.lost.total) == (0, 0)
