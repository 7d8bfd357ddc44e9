"""The demo's rules, and the relay that stands for a missing Alertmanager or Prometheus."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from trainmedic_server.demo.alert_relay import AlertRelay, FiringAlert, MeasuredAlerts
from trainmedic_server.demo.demo_rules import RULES, rules_file

SPIKE, GRADIENTS, HEAT = RULES
ALERT = FiringAlert({"alertname": "TrainingLossSpike", "job_name": "llm-1"}, "The loss jumped")


@pytest.mark.parametrize(
    ("rule", "values", "holds"),
    [
        (SPIKE, [4.4, 3.0, 2.5], False),
        (SPIKE, [2.5, 2.4, 4.4], True),
        (SPIKE, [], False),
        (HEAT, [70.0, 86.0, 60.0], True),
        (HEAT, [70.0, 84.0], False),
        (GRADIENTS, [2.0, 60.0], True),
    ],
)
def test_a_rule_evaluates_the_recent_past(rule: Any, values: list[float], holds: bool) -> None:
    """A falling loss is no jump; heat counts until its period is over."""
    assert rule.holds(values) is holds


def test_the_same_rules_are_given_to_prometheus() -> None:
    """Each has its expression, with labels in place of names."""
    (group,) = json.loads(rules_file())["groups"]
    assert [(rule["alert"], rule["expr"]) for rule in group["rules"]] == [
        (
            "TrainingLossSpike",
            "max without (instance, job) (training_loss_lowest_of_five - "
            "min_over_time(training_loss_lowest_of_five[40s])) > 0.9",
        ),
        ("GradientExplosion", "max without (instance, job) (max_over_time(gradient_norm[5s])) > 40"),
        ("GPUTemperatureHigh", "max without (instance, job) (max_over_time(gpu_temperature_celsius[25s])) > 85"),
    ]
    assert group["rules"][0]["annotations"] == {"summary": "The loss of {{ $labels.job_name }} jumped"}


class Now:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_measured_values_are_dropped_after_the_rule_period() -> None:
    """So an alert ends; values that are not numbers are left out."""
    now = Now()
    measured = MeasuredAlerts([], now)
    line = '# TYPE gradient_norm gauge\ngradient_norm{{job_name="llm-2"}} {}\n'
    for second, value in enumerate(("2", "120", "NaN", "2", "2", "2", "2", "2")):
        now.seconds = float(second)
        measured.take(line.format(value))
        (firing,) = list(measured.firing()) or [None]
        assert (firing is not None) == (1 <= second <= 6), second
        if firing is not None:
            assert firing.labels == {
                "alertname": "GradientExplosion",
                "job_name": "llm-2",
                "severity": "critical",
                "component": "training",
            }


def test_a_measured_alert_also_ends_without_further_values() -> None:
    """Examples are gradients that stay NaN, and a job that ended."""
    now = Now()
    measured = MeasuredAlerts([], now)
    measured.take('gradient_norm{job_name="llm-2"} 120\n')
    assert list(measured.firing())
    now.seconds += GRADIENTS.seconds + 1
    measured.take('gradient_norm{job_name="llm-2"} NaN\n')
    assert not list(measured.firing())


class Given:
    def __init__(self) -> None:
        self.alerts: list[FiringAlert] = []

    def firing(self) -> Iterable[FiringAlert]:
        return self.alerts


class Webhook:
    def __init__(self) -> None:
        self.got: list[Any] = []
        self.is_away = False

    def __call__(self, url: str, body: Any) -> None:
        if self.is_away:
            raise httpx.ConnectError("away")
        self.got.append(body)


def test_an_alert_is_posted_when_it_begins_and_when_it_ends() -> None:
    """It is posted once each, with the same start; a post that failed is repeated at the next look."""
    given, webhook = Given(), Webhook()
    relay = AlertRelay(given, "http://server/webhook", webhook)
    relay.relay()
    given.alerts, webhook.is_away = [ALERT], True
    with pytest.raises(httpx.ConnectError):
        relay.relay()
    webhook.is_away = False
    relay.relay()
    relay.relay()
    given.alerts = []
    relay.relay()
    relay.relay()
    (begun,), (over,) = (body["alerts"] for body in webhook.got)
    assert (begun["status"], over["status"]) == ("firing", "resolved")
    assert begun["labels"] == over["labels"] == ALERT.labels
    assert begun["startsAt"] == over["startsAt"]
