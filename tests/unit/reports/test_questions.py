"""What is asked of Prometheus: of metrics that there are, and bounded."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

import pytest

from tests.driver.driver import Driver
from trainmedic.job.metrics import HELP
from trainmedic_agent.adapters.nvml_gpus import NvmlGpus
from trainmedic_agent.counters import AgentCounters
from trainmedic_agent.exporter import AgentCollector
from trainmedic_agent.gpu_record import GpuRecord
from trainmedic_server import telemetry
from trainmedic_server.errors import MetricsUnavailable
from trainmedic_server.ports.metric_history import MetricSeries
from trainmedic_server.reports.job_queries import INTERVALS, JobQueries
from trainmedic_server.reports.job_report import JobRecords, job_report

END = datetime(2026, 1, 31, 12, tzinfo=UTC)


class Asked:
    """A Prometheus that has one point for every question, and notes them."""

    def __init__(self, apart: float = 15.0) -> None:
        self.questions: list[tuple[str, datetime, datetime, timedelta]] = []
        self._apart = timedelta(seconds=apart)

    async def read(self, query: str, begin: datetime, end: datetime, every: timedelta) -> Sequence[MetricSeries]:
        self.questions.append((query, begin, end, every))
        value = every // self._apart if "count_over_time(training" in query else 1.0
        return [MetricSeries({"window": "checkpoint"}, ((begin.timestamp(), value),))]


async def asked(span: timedelta, apart: float = 15.0) -> Asked:
    prometheus = Asked(apart)
    await JobQueries(prometheus, 'a"b\\c', END - span, END).figures()
    return prometheus


@pytest.mark.parametrize("span", [timedelta(minutes=1), timedelta(hours=1), timedelta(days=1), timedelta(days=366)])
async def test_every_question_is_bounded_and_within_its_time(span: timedelta) -> None:
    """However long the time is: few questions, few points, and none after the end."""
    questions = (await asked(span)).questions
    assert len(questions) < 50
    for query, begin, end, every in questions:
        assert (end - begin) / every <= INTERVALS + 1, query
        assert begin <= end
        assert end <= END or end - END <= timedelta(minutes=10), query
        assert r'job_name="a\u0022b\u005cc"' in query or "up[" in query


async def test_an_interval_has_at_least_two_scrapes() -> None:
    """Where jobs are scraped each two minutes, a minute would have gaps that are none."""
    intervals = {
        every
        for query, _, _, every in (await asked(timedelta(hours=1), apart=120)).questions
        if "training_stall" in query
    }
    assert min(intervals) == timedelta(minutes=5)


class Overcharged(Asked):
    """One for which the figures of so many GPUs are too much."""

    async def read(self, query: str, begin: datetime, end: datetime, every: timedelta) -> Sequence[MetricSeries]:
        if "gpu_utilization_percent" in query:
            raise MetricsUnavailable("Prometheus refuses: too many samples")
        return await super().read(query, begin, end, every)


async def test_gpus_that_are_too_many_cost_only_their_own_figures() -> None:
    """The rest of the report is there, and the reason is Prometheus's own."""
    figures = await JobQueries(Overcharged(), "llm-1", END - timedelta(days=1), END).figures()
    assert figures.progress is not None
    assert figures.gpus == 1
    report = job_report("llm-1", END - timedelta(days=1), END, figures, JobRecords(), None)
    assert report.unknown["gpu_utilization"] == "Prometheus refuses: too many samples"
    assert report.goodput is not None


async def test_the_metrics_that_are_asked_for_are_offered(
    make_driver: Callable[..., Driver], gpu_record: GpuRecord
) -> None:
    """By the server, the agent or the SDK; so no figure is silently unknown for ever."""
    make_driver(1)
    gpus = NvmlGpus()
    collectors = (
        telemetry.Metrics().registry,
        AgentCollector(gpus, dict, AgentCounters(), {"node": "n1"}, gpu_record),
    )
    offered = {metric.name for collector in collectors for metric in collector.collect()} | HELP.keys()
    gpus.close()
    queries = " ".join(query for query, *_ in (await asked(timedelta(days=1))).questions)
    named = set(re.findall(r"\b(?:trainmedic|gpu|gradient|training)_[a-z_]+", queries))
    assert len(named) > 20
    assert named <= offered
