"""``prometheus.query``: outputs, shared requests, and what a missing Prometheus says."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from trainmedic_core.target import Target, TargetKind
from trainmedic_server import errors
from trainmedic_server.actions.prometheus import AT_ONCE, MOST_SERIES, PrometheusQuery, PrometheusQueryParams
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.ports.actions import Call, Services
from trainmedic_server.ports.metric_history import MetricSeries

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Clock:
    def now(self) -> datetime:
        return NOW

    async def sleep_until(self, when: datetime) -> None:
        raise AssertionError(when)


class Prometheus:
    """Answers by query; models no PromQL, and waits while `gate` is shut."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.most = self.now = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def read(self, query: str, begin: datetime, end: datetime, every: timedelta) -> Sequence[MetricSeries]:
        assert begin == end == NOW
        self.asked.append(query)
        self.now += 1
        self.most = max(self.most, self.now)
        await self.gate.wait()
        self.now -= 1
        answer = self.answers.get(query, [])
        if isinstance(answer, Exception):
            raise answer
        return [MetricSeries({"gpu": str(number)}, ((0.0, value),)) for number, value in enumerate(answer)]


def made(prometheus: Prometheus | None) -> PrometheusQuery:
    unused: Any = None
    return PrometheusQuery(Services(Clock(), unused, unused, metrics=prometheus))


def call(query: str) -> Call:
    alert = Alert("f", AlertStatus.FIRING, {"alertname": "A"}, {}, NOW, None)
    target, params = Target(TargetKind.CLUSTER), PrometheusQueryParams(query=query)
    return Call("c", "r", "p", target, params, "A", NOW, NOW + timedelta(minutes=1), alert)


async def test_the_first_sample_is_the_value() -> None:
    """Each series keeps its labels."""
    output = await made(Prometheus(up=[1.0, 0.0])).perform(call("up"))
    series = [{"labels": {"gpu": "0"}, "value": 1.0}, {"labels": {"gpu": "1"}, "value": 0.0}]
    assert output == {"value": 1.0, "series": series, "count": 2, "compared": 1.0}


async def test_a_comparison_that_nothing_passes_reports_the_value() -> None:
    """The result has no value, because the query returned no sample."""
    output = await made(Prometheus(busy=[42.0])).perform(call("busy < 30"))
    assert (output["value"], output["series"], output["compared"]) == (None, [], 42.0)


async def test_non_numeric_values_are_none() -> None:
    """JSON has no NaN. The series is still listed."""
    output = await made(Prometheus(up=[math.nan])).perform(call("up"))
    assert (output["value"], output["count"]) == (None, 1)


async def test_an_output_is_bounded() -> None:
    """The count includes all series."""
    output = await made(Prometheus(up=[1.0] * 5000)).perform(call("up"))
    assert (len(output["series"]), output["count"]) == (MOST_SERIES, 5000)


async def test_equal_queries_share_a_request_and_few_run_at_once() -> None:
    """A cancelled caller does not end the request of the others."""
    prometheus = Prometheus(**{f"q{number}": [1.0] for number in range(50)})
    prometheus.gate.clear()
    action = made(prometheus)
    tasks = [asyncio.create_task(action.perform(call(f"q{number % 50}"))) for number in range(200)]
    for _ in range(20):
        await asyncio.sleep(0)
    tasks[0].cancel()
    prometheus.gate.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(outcome, dict) for outcome in outcomes) == 199
    assert (len(prometheus.asked), prometheus.most) == (50, AT_ONCE)


@pytest.mark.parametrize(
    ("prometheus", "kind", "text"),
    [
        (None, errors.PermanentFailure, "--prometheus-url"),
        (Prometheus(up=errors.MetricsRefused("parse error")), errors.PermanentFailure, "parse error"),
        (Prometheus(up=errors.MetricsUnavailable("no answer")), errors.TemporaryFailure, "no answer"),
    ],
)
async def test_the_reason_for_a_missing_value_is_reported(
    prometheus: Prometheus | None, kind: type[Exception], text: str
) -> None:
    """An invalid query is not retried; an outage is."""
    with pytest.raises(kind, match=text):
        await made(prometheus).perform(call("up"))
