"""What a job reports, as Prometheus gets it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trainmedic.progress import Progress


def reported(*reports: dict[str, Any], every: float = 1.0) -> Progress:
    progress = Progress()
    for number, one in enumerate(reports):
        fields = {"step": None, "loss": None, "grad_norm": None, "learning_rate": None, "samples": None, **one}
        progress.note(**fields, now=number * every)
    return progress


def test_only_what_was_reported_is_shown() -> None:
    """An absent value is not 0."""
    assert reported().values(0) == {}
    assert reported({"loss": 2.5}).values(0) == {"training_loss": 2.5}


def test_all_of_a_step_is_shown_under_its_name() -> None:
    """The names that the alert rules use."""
    step = {"loss": 2.5, "grad_norm": 0.9, "learning_rate": 1e-4, "samples": 32}
    values = reported(*({**step, "step": number} for number in range(4)), every=0.5).values(1.5)
    assert values == pytest.approx(
        {
            "training_loss": 2.5,
            "gradient_norm": 0.9,
            "training_learning_rate": 1e-4,
            "training_step_seconds": 0.5,
            "training_step_median_seconds": 0.5,
            "training_throughput_samples_per_second": 64.0,
        }
    )


def test_a_report_every_few_steps_counts_them_all() -> None:
    """Ten steps and 320 samples in 5 seconds are 64 samples a second, and half a second a step."""
    progress = reported(*({"step": 10 * number, "samples": 320} for number in range(4)), every=5.0)
    values = progress.values(15.0)
    assert values["training_step_seconds"] == pytest.approx(0.5)
    assert values["training_throughput_samples_per_second"] == pytest.approx(64.0)
    assert progress.steps == 31


def test_a_step_that_goes_back_counts_once() -> None:
    """After a rollback the counter goes on."""
    progress = reported({"step": 100}, {"step": 101}, {"step": 50}, {"step": 51})
    assert (progress.step, progress.steps) == (51, 4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "not a number", object()])
def test_what_is_not_finite_is_nan(value: Any) -> None:
    """So that a rule can see it: NaN is the one value that differs from itself."""
    assert math.isnan(reported({"loss": value}).values(0)["training_loss"])


def test_a_loss_is_not_believed_where_the_gradient_is_not_finite() -> None:
    """Some frameworks log a loss of 0.0 then."""
    values = reported({"loss": 0.0, "grad_norm": math.inf}).values(0)
    assert math.isnan(values["training_loss"])
    assert math.isnan(values["gradient_norm"])


def test_a_loop_that_hangs_does_not_look_busy() -> None:
    """The throughput falls while a step takes longer than usual."""
    progress = reported(*({"samples": 10} for _ in range(5)))
    assert progress.values(4.5)["training_throughput_samples_per_second"] == pytest.approx(10.0)
    assert progress.values(104.0)["training_throughput_samples_per_second"] == pytest.approx(0.1)
    assert progress.values(104.0)["training_step_seconds"] == pytest.approx(100.0)


def test_a_tensor_is_kept_without_its_graph_and_read_when_asked() -> None:
    """The training thread does not wait for it."""

    class Tensor:
        read = False

        def detach(self) -> Detached:
            return Detached(self)

    class Detached:
        def __init__(self, whole: Tensor) -> None:
            self.whole = whole

        def __float__(self) -> float:
            self.whole.read = True
            return 2.5

    tensor = Tensor()
    progress = reported({"loss": tensor})
    assert not tensor.read
    assert progress.values(0) == {"training_loss": 2.5}
