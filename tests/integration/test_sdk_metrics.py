"""The job's Prometheus endpoint, asked over HTTP."""

from __future__ import annotations

import math
import socket
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import trainmedic


def scrape(port: int | None) -> dict[str, tuple[dict[str, str], float]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
        text = reply.read().decode()
    return {
        sample.name: (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def connect(**options: Any) -> trainmedic.Medic:
    return trainmedic.connect(job="llm-1", redis_url="redis://127.0.0.1:1/0", **options)


def test_prometheus_gets_what_was_reported() -> None:
    """By job_name and nothing else: a step label would make a new series each step."""
    with connect(metrics_port=0) as medic:
        for step in range(3):
            medic.report(step=step, loss=2.5, grad_norm=0.5, learning_rate=1e-4, samples=8)
        found = scrape(medic.metrics_port)
    assert set(found) == {
        "training_loss",
        "gradient_norm",
        "training_learning_rate",
        "training_step_seconds",
        "training_step_median_seconds",
        "training_throughput_samples_per_second",
        "training_steps_total",
    }
    assert all(labels == {"job_name": "llm-1"} for labels, _ in found.values())
    assert (found["training_loss"][1], found["training_steps_total"][1]) == (2.5, 3)


def test_a_loss_that_is_not_finite_is_nan_on_the_wire() -> None:
    """Prometheus' text format has a word for it."""
    with connect(metrics_port=0) as medic:
        medic.report(step=1, loss=math.inf)
        assert math.isnan(scrape(medic.metrics_port)["training_loss"][1])


def test_a_port_that_is_taken_is_told_when_connecting() -> None:
    """A job that nobody can watch is not what was asked for."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(trainmedic.ConfigurationError, match="metrics cannot be offered"):
            connect(metrics_port=taken.getsockname()[1])


def test_without_prometheus_client_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where metrics are asked for."""
    monkeypatch.setattr("trainmedic.metrics.prometheus_client", None)
    with pytest.raises(trainmedic.ConfigurationError, match=r"pip install 'trainmedic\[metrics\]'"):
        connect(metrics_port=0)
    connect().close()


def test_other_ranks_have_no_endpoint_and_get_no_commands() -> None:
    """Rank 0 speaks for the job."""
    with connect(rank=1, world_size=2, metrics_port=0) as medic:
        medic.report(step=1, loss=2.5)
        assert (medic.metrics_port, medic.commands(1)) == (None, [])


def test_closing_gives_the_port_back() -> None:
    """So that a loop that starts over can connect again."""
    with connect(metrics_port=0) as medic:
        port = medic.metrics_port
    with connect(metrics_port=port) as medic:
        assert medic.metrics_port == port
    medic.close()
