"""The throughput and utilisation of a job, as Prometheus has them, and the time of training that they are of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest

from trainmedic_core.target import Target, TargetKind
from trainmedic_server.actions.job_load import JobLoad
from trainmedic_server.domain import promql
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.errors import MetricsUnavailable, NoLongerWanted, PermanentFailure, TemporaryFailure
from trainmedic_server.ports.actions import Call, Services
from trainmedic_server.ports.metric_history import MetricSeries
from trainmedic_server.simulation import virtual_time
from trainmedic_server.simulation.virtual_time import BEGINNING, VirtualClock

JOB = 'a"b'
FIGURES = {"utilization_percent": 37.5, "throughput_samples": 90.0}


class Prometheus:
    """What the queries answer; steps are counted since `restarted`, one a second after `starting` seconds, none after
    `hangs_at`.
    """

    def __init__(
        self, restarted: float = -3600.0, starting: float = 0.0, hangs_at: float = math.inf, **figures: float
    ) -> None:
        self._figures = figures or FIGURES
        self._hangs_at = hangs_at
        self._begin = restarted + starting
        self._restarted = restarted
        self.is_away = False
        self.questions: list[str] = []

    async def read(self, query: str, begin: datetime, end: datetime, every: timedelta) -> Sequence[MetricSeries]:
        self.questions.append(query)
        if self.is_away:
            raise MetricsUnavailable("Prometheus does not answer")
        if "training_steps_total" in query:
            looks = [begin + number * every for number in range((end - begin) // every + 1)]
            return [MetricSeries({}, [(at.timestamp(), self._steps(at)) for at in looks if self._is_there(at)])]
        value = next((value for name, value in self._figures.items() if name in query), None)
        return [] if value is None else [MetricSeries({}, [(end.timestamp(), value)])]

    def _is_there(self, at: datetime) -> bool:
        return not -30 <= (at - BEGINNING).total_seconds() - self._restarted < 0

    def _steps(self, at: datetime) -> float:
        after = min((at - BEGINNING).total_seconds(), self._hangs_at)
        return max(after - self._begin, 0.0) if after >= self._restarted else after + 36_000.0


def load(prometheus: Prometheus | None, clearance: str = "go_on", **params: Any) -> tuple[Mapping[str, Any], float]:
    """The output, and how many seconds it took."""

    async def perform() -> tuple[Mapping[str, Any], float]:
        clock = VirtualClock()
        services = Services(clock, None, None, metrics=prometheus)  # type: ignore[arg-type]
        alert = Alert("0" * 16, AlertStatus.FIRING, {"alertname": "A"}, {}, clock.now(), None)

        async def cleared() -> str:
            return clearance

        call = Call(
            command_id="c1",
            run_id="r1",
            playbook="p",
            target=Target(TargetKind.JOB, job=JOB),
            params=JobLoad.Params(**params),
            reason="",
            issued_at=clock.now(),
            deadline=clock.now() + timedelta(hours=1),
            alert=alert,
            clearance=cleared,  # type: ignore[arg-type]
        )
        output = await JobLoad(services).perform(call)
        return output, (clock.now() - BEGINNING).total_seconds()

    return virtual_time.run(perform())


def test_figures_in_prometheus_are_reported_and_missing_ones_are_null() -> None:
    """The job's name is text, whatever it contains."""
    prometheus = Prometheus()
    output, seconds = load(prometheus)
    assert output == {
        "throughput": 90.0, "unit": "samples/s", "target": None, "utilization_percent": 37.5, "over_seconds": 600.0,
    }  # fmt: skip
    assert seconds == 0
    assert all(f"job_name={promql.quoted(JOB)}" in query for query in prometheus.questions)
    nothing, _ = load(Prometheus(none=0.0))
    assert {nothing["throughput"], nothing["unit"], nothing["utilization_percent"]} == {None}


def test_of_two_throughputs_the_one_with_a_target_counts() -> None:
    """Only that one can be compared with a target."""
    output, _ = load(Prometheus(throughput_samples=90.0, throughput_tokens=9e4, target_tokens=1e5))
    assert (output["throughput"], output["unit"], output["target"]) == (9e4, "tokens/s", 1e5)


def test_a_fresh_figure_is_of_training_after_the_step_started() -> None:
    """A job that restarts for 7 minutes is waited for until it has trained for 10."""
    _, at_once = load(Prometheus(), fresh=True)
    assert at_once == 600
    _, restarted = load(Prometheus(restarted=60.0, starting=420.0), fresh=True)
    assert 480 + 600 <= restarted <= 480 + 600 + 60


def test_a_job_that_does_not_resume_training_finally_fails() -> None:
    """It fails at the deadline; so does one whose wait is no longer wanted."""
    with pytest.raises(TemporaryFailure, match="has not trained for 10m without a break"):
        load(Prometheus(restarted=60.0, starting=90_000.0), fresh=True)
    with pytest.raises(TemporaryFailure, match="has not trained for 10m without a break"):
        load(Prometheus(hangs_at=-60.0), fresh=True)
    with pytest.raises(NoLongerWanted):
        load(Prometheus(restarted=60.0, starting=90_000.0), clearance="resolved", fresh=True)


@pytest.mark.parametrize(
    ("prometheus", "least", "why"),
    [
        (Prometheus(), 90.5, "the throughput is 90 samples/s, under 90.5"),
        (Prometheus(utilization_percent=50.0), 1.0, "the throughput is unknown"),
    ],
)
def test_a_too_low_or_unknown_throughput_fails(prometheus: Prometheus, least: float, why: str) -> None:
    """The failure is permanent: a retry would see the same."""
    load(Prometheus(), least_throughput=90.0)
    with pytest.raises(PermanentFailure, match=why):
        load(prometheus, least_throughput=least)


def test_without_prometheus_nothing_is_known() -> None:
    """The failure is permanent if none is set, and temporary if it is unavailable."""
    with pytest.raises(PermanentFailure, match="no Prometheus is set"):
        load(None)
    away = Prometheus()
    away.is_away = True
    with pytest.raises(TemporaryFailure, match="does not answer"):
        load(away)
