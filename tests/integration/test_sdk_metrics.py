"""The job's Prometheus endpoint, asked over HTTP."""

from __future__ import annotations

import math
import socket
import time
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import trainmedic
from trainmedic.job.metrics import HELP


def scrape(port: int | None) -> dict[str, tuple[dict[str, str], float]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    return {
        sample.name: (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def connect(**options: Any) -> trainmedic.Medic:
    return trainmedic.connect(job="llm-1", redis_url="redis://127.0.0.1:1/0", **options)


def test_prometheus_gets_what_was_reported() -> None:
    """The label is job_name, and never the step, which would make a new series each step."""
    with connect(metrics_port=0) as medic:
        for step in range(3):
            medic.report(
                step=step,
                loss=2.5,
                grad_norm=0.5,
                learning_rate=1e-4,
                samples=8,
                tokens=80,
                expected_learning_rate=1e-4,
                data_seconds=0.0,
                wait_seconds=0.0,
            )
        medic.report_evaluation(loss=1.5, perplexity=4.5)
        with medic.window("checkpoint"):
            medic.saved(2)
        found = scrape(medic.metrics_port)
    assert set(HELP) - set(found) == {
        # Of accelerators, and of what was not reported.
        "training_cuda_memory_reserved_bytes",
        "training_cuda_memory_retries_total",
        "training_memory_growth_bytes_per_step",
        "training_layer_gradient_norm",
        "training_ranks_differing",
        "training_rollback_not_held",
        "training_target_samples_per_second",
        "training_target_tokens_per_second",
        # Of more reports.
        "training_loss_lowest_of_five",
        "training_loss_spread",
        # Of some seconds more.
        "training_cpu_cores",
        "training_rank_cpu_cores",
    }
    ours = {name: labels for name, (labels, _) in found.items() if not name.startswith("process_")}
    assert {labels.pop("job_name") for labels in ours.values()} == {"llm-1"}
    assert {name: set(labels) for name, labels in ours.items() if labels} == {
        "training_window_open": {"window"},
        "training_window_seconds_total": {"window"},
        "training_memory_used_bytes": {"memory"},
        "training_memory_limit_bytes": {"memory"},
        "training_memory_rank": {"memory"},
        "training_rank_own_seconds": {"rank", "rank_node"},
        "training_rank_data_seconds": {"rank", "rank_node"},
        "training_evaluation_metric": {"metric"},
        "training_evaluation_metric_step": {"metric"},
    }
    evaluation = [found[f"training_evaluation_{name}"][1] for name in ("step", "loss", "perplexity")]
    assert evaluation == [2, 1.5, 4.5]
    assert (found["training_loss"][1], found["training_steps_total"][1], found["training_checkpoint_step"][1]) == (
        2.5,
        3,
        2,
    )
    assert found["process_start_time_seconds"][1] < found["training_checkpoint_timestamp_seconds"][1]


def test_rank_0_shows_the_figures_of_all_ranks() -> None:
    """It gathered those of the others; for its own it is the best source."""
    with connect(metrics_port=0) as medic:
        medic.gather = lambda: {0: {"own_seconds": 99.0}, 5: {"own_seconds": 3.0, "node": "node-5"}}
        medic.report(step=1, own_seconds=1.0)
        medic.report(step=2, own_seconds=1.0)
        medic.progress.ranks_differing = 1
        medic.progress.rollback_not_held = True
        found = scrape(medic.metrics_port)
    assert found["training_ranks"][1] == 2
    assert found["training_ranks_differing"][1] == 1
    assert found["training_rollback_not_held"][1] == 1
    assert found["training_own_median_seconds"][1] == 1.0


def test_a_stall_is_reported_with_its_limit() -> None:
    """A window is not."""
    with connect(metrics_port=0, hang_floor=0.05, startup_floor=30.0) as medic:
        for step in range(10):
            medic.report(step=step)
        time.sleep(0.1)
        assert medic.stall().is_hang
        found = scrape(medic.metrics_port)
    assert found["training_stall_seconds"][1] > found["training_hang_limit_seconds"][1] == 0.05


def test_a_non_finite_loss_is_nan_on_the_wire() -> None:
    """Prometheus' text format supports it."""
    with connect(metrics_port=0) as medic:
        medic.report(step=1, loss=math.inf)
        assert math.isnan(scrape(medic.metrics_port)["training_loss"][1])


def test_an_occupied_port_is_reported_when_connecting() -> None:
    """A job that cannot be monitored is not what was asked for."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(trainmedic.ConfigurationError, match="metrics cannot be offered"):
            connect(metrics_port=taken.getsockname()[1])


def test_without_prometheus_client_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """It appears only if metrics are requested."""
    monkeypatch.setattr("trainmedic.job.metrics.prometheus_client", None)
    with pytest.raises(trainmedic.ConfigurationError, match="the extra metrics of trainmedic"):
        connect(metrics_port=0)
    connect().close()


def test_other_ranks_have_no_endpoint_and_get_no_commands() -> None:
    """Rank 0 represents the job."""
    with connect(rank=1, world_size=2, metrics_port=0) as medic:
        medic.report(step=1, loss=2.5)
        assert (medic.metrics_port, medic.commands(1)) == (None, [])


def test_closing_releases_the_port() -> None:
    """A loop that starts over can connect again."""
    with connect(metrics_port=0) as medic:
        port = medic.metrics_port
    with connect(metrics_port=port) as medic:
        assert medic.metrics_port == port
    medic.close()
