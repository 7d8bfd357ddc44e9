"""What a job reports: as Prometheus gets it, and as it is kept for those who look back."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch

from trainmedic.job.metrics import JobCollector
from trainmedic.job.progress import TENSOR_INTERVAL, Progress
from trainmedic.job.reports import JobReports
from trainmedic.wire import evaluations


def reported(*reports: dict[str, Any], every: float = 1.0) -> Progress:
    progress = Progress()
    for number, one in enumerate(reports):
        fields = {"step": None, "loss": None, "grad_norm": None, "learning_rate": None, "samples": None, **one}
        progress.add_report(**fields, now=number * every)
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


def test_gradients_that_overflow_under_a_loss_scaler_are_no_fault() -> None:
    """Its update is skipped, and the next scale is half as large. Twenty in a row are more than that explains."""
    norms = [math.inf, 1.0, *([math.inf] * 20)]
    seen = []
    for count in range(1, len(norms) + 1):
        progress = reported(*({"step": number, "loss": 2.0, "grad_norm": norms[number]} for number in range(count)))
        progress.skips_overflows = True
        seen.append(progress.values(0))
    assert [values["training_loss"] for values in seen[:-1]] == [2.0] * (len(norms) - 1)
    assert [values.get("gradient_norm") for values in seen[:3]] == [None, 1.0, None]
    assert math.isnan(seen[-1]["training_loss"])
    assert math.isnan(seen[-1]["gradient_norm"])
    lost = reported({"step": 1, "loss": math.nan, "grad_norm": math.nan})
    lost.skips_overflows = True
    assert math.isnan(lost.values(0)["training_loss"])


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


# --- the learning rate against its schedule ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "expected", "off"),
    [(1e-3, 1e-3, 0.0), (1e-2, 1e-3, 0.9), (1e-3, 1e-2, 0.9), (0.0, 0.0, 0.0), (0.0, 1e-3, 1.0), (math.nan, 1e-3, 1.0)],
)
def test_a_rate_off_its_schedule_is_seen_in_either_direction(rate: float, expected: float, off: float) -> None:
    """As a part of the larger one, so never divided by the 0 that a warm-up starts from."""
    values = reported({"learning_rate": rate, "expected_learning_rate": expected}).values(0)
    assert values["training_learning_rate_deviation"] == pytest.approx(off)


def test_without_an_expected_rate_nothing_is_off() -> None:
    """A job that does not say what it expects raises no alarm."""
    assert "training_learning_rate_deviation" not in reported({"learning_rate": 1e-3}).values(0)


# --- what is kept of a report ---------------------------------------------------------------------------


@pytest.mark.parametrize("step", [7.0, "7", Fraction(7)])
def test_a_step_of_another_type_is_taken_as_a_number(step: Any) -> None:
    """NumPy's numbers and tensors among them; JSON could not write those."""
    progress = Progress()
    progress.add_report(step, 1.0, None, None, None, 1.0)
    assert (progress.step, type(progress.step)) == (7, int)


def test_a_step_that_no_counter_reaches_is_not_taken() -> None:
    """Nothing could be divided by it, nor Prometheus read it."""
    progress = Progress()
    for now, step in enumerate([1, 10**400, -(10**400), 4]):
        progress.add_report(step, 1.0, None, None, None, float(now))
    assert (progress.reached, progress.values(4.0)["training_step_seconds"] > 0) == ((6, 4), True)
    families = JobCollector("llm-1", progress, dict, lambda: 4.0).collect()
    assert all(float(sample.value) >= 0 for family in families for sample in family.samples)


def test_figures_that_are_no_numbers_are_left_out() -> None:
    """A slip in a report does not take the other figures away."""
    progress = Progress()
    for now in range(8):
        progress.add_report("seven", 1.0, None, None, "eight", float(now), own_seconds="nine")  # type: ignore[arg-type]
    assert progress.values(8.0)["training_loss"] == 1.0
    assert "training_throughput_samples_per_second" not in progress.values(8.0)
    assert (progress.step, progress.pace.parts().own) == (None, None)


class Tensor:
    """Counts how often it was freed from its graph."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.detached = 0

    def detach(self) -> Tensor:
        self.detached += 1
        return self

    def __float__(self) -> float:
        return self.value


def test_of_quick_steps_numbers_are_all_taken_and_tensors_now_and_then() -> None:
    """Freeing a tensor costs more than all the rest; steps of the usual length have every one taken."""
    progress = Progress()
    losses = [Tensor(float(number)) for number in range(100)]
    for number, loss in enumerate(losses):
        progress.add_report(number, loss, number, None, None, now=number * 0.01)
    assert sum(loss.detached for loss in losses) == pytest.approx(100 * 0.01 / TENSOR_INTERVAL, abs=5)
    assert 99 - float(progress.loss) < TENSOR_INTERVAL / 0.01
    assert progress.grad_norm == 99
    slow = Tensor(7.0)
    progress.add_report(100, slow, None, None, None, now=2.0)
    assert progress.loss is slow


def test_the_losses_of_reports_are_kept_as_they_were() -> None:
    """Of those that come faster than tensors are taken, not all; a tensor that the script changes later is a copy."""
    progress = Progress()
    running = torch.zeros(())
    for step in range(1, 5):
        running += 1
        progress.add_report(step, running, None, None, None, now=float(step))
        progress.add_report(step, 99.0, None, None, None, now=step + TENSOR_INTERVAL / 2)
    assert [(values.step, values.at, values.loss, values.grad_norm) for values in progress.record.read()] == [
        (step, float(step), float(step), None) for step in range(1, 5)
    ]
    progress.record.forget_after(2)
    progress.add_late_values(None, torch.tensor(math.inf))
    assert [values.step for values in progress.record.read()] == [1, 2, 4]
    assert math.isnan(progress.record.read()[-1].grad_norm)


def test_what_was_given_up_is_not_the_last_report() -> None:
    """After a rollback, until the next report, which is taken whole however soon it comes."""
    progress = Progress()
    progress.add_report(4, torch.tensor(1.0), torch.tensor(2.0), None, None, now=1.0)
    progress.add_report(5, torch.tensor(math.nan), torch.tensor(9.0), None, None, now=2.0)
    progress.go_back(4, 1.0)
    assert (progress.loss, progress.grad_norm) == (1.0, None)
    progress.add_report(5, torch.tensor(3.0), None, None, None, now=2.0 + TENSOR_INTERVAL / 2)
    assert float(progress.loss) == 3.0
    assert [values.step for values in progress.record.read()] == [4, 5]


def test_a_step_that_goes_back_begins_another_course() -> None:
    """What was reported of it before is not compared with: a process may train twice."""
    progress = Progress()
    for now, step in enumerate((5, 6, 7, 5, 6), 1):
        progress.add_report(step, float(now), None, None, None, now=float(now))
    assert [(values.step, values.loss) for values in progress.record.read()] == [(5, 4.0), (6, 5.0)]


def test_a_report_without_a_step_is_not_kept() -> None:
    """It could not be said which checkpoints it concerns."""
    progress = Progress()
    progress.add_report(None, 1.0, None, None, None, now=1.0)
    assert progress.record.read() == []


def test_a_kept_loss_holds_no_graph_and_no_more_memory_than_its_number() -> None:
    """A script may report one element of a large tensor."""
    progress = Progress()
    weights = torch.ones(1000, requires_grad=True)
    progress.add_report(1, (weights * 2)[0], None, None, None, now=1.0)
    (kept,) = progress.record._reports
    assert (kept.loss, progress.loss) == (2.0, 2.0)


def test_a_loss_on_a_device_is_kept_there_without_its_graph() -> None:
    """To read it would wait for the device."""
    progress = Progress()
    weights = torch.ones(1000, requires_grad=True, device="meta")
    progress.add_report(1, (weights * 2)[0], None, None, None, now=1.0)
    (kept,) = progress.record._reports
    assert kept.loss.grad_fn is None
    assert kept.loss.untyped_storage().nbytes() == 4


@pytest.mark.parametrize("loss", [torch.ones(2), torch.ones(0), torch.tensor(math.inf), torch.tensor(math.nan)])
def test_a_tensor_that_is_no_finite_number_is_nan(loss: torch.Tensor) -> None:
    """Several numbers, or none, are no loss."""
    progress = Progress()
    progress.add_report(1, loss, None, None, None, now=1.0)
    assert math.isnan(progress.values(1.0)["training_loss"])


def test_values_of_a_step_that_is_counted_later_are_recorded() -> None:
    """They are of their own step; the next report counts it."""
    progress = Progress()
    progress.add_report(1, 1.0, None, None, None, now=1.0)
    progress.add_values(2, torch.tensor(2.0), torch.tensor(3.0), now=1.1)
    assert (progress.step, progress.steps, progress.loss) == (2, 1, 2.0)
    assert [(values.step, values.loss, values.grad_norm) for values in progress.record.read()] == [
        (1, 1.0, None),
        (2, 2.0, 3.0),
    ]
    progress.add_report(3, None, None, None, None, now=1.3)
    assert progress.steps == 3


def test_the_step_that_prometheus_gets_is_that_of_the_steps_that_were_counted() -> None:
    """Also between a step's values and its report: else each scrape could look as if a step had been done again."""
    progress = Progress()

    def scraped() -> tuple[float, float | None]:
        families = JobCollector("llm-1", progress, dict, lambda: 2.0).collect()
        found = {sample.name: sample.value for family in families for sample in family.samples}
        return found["training_steps_total"], found.get("training_step")

    assert scraped() == (0, None)
    progress.add_report(10, 1.0, None, None, None, now=1.0)
    progress.add_values(11, 1.0, None, now=1.1)
    assert scraped() == (1, 10)
    progress.add_report(11, None, None, None, None, now=1.2)
    assert scraped() == (2, 11)
    progress.begin_training(now=1.3)
    assert scraped() == (2, None)


def test_tokens_and_evaluations_are_shown_where_they_were_reported() -> None:
    """An evaluation is of the last reported step, unless it says of which."""
    progress = reported(*({"step": number, "tokens": 400} for number in range(3)), every=0.5)
    assert progress.values(1.0)["training_throughput_tokens_per_second"] == pytest.approx(800.0)
    assert "training_throughput_samples_per_second" not in progress.values(1.0)
    progress.add_evaluation(torch.tensor(1.5), None, None)
    shown = {name: value for name, value in progress.values(1.0).items() if "evaluation" in name}
    assert shown == {"training_evaluation_step": 2, "training_evaluation_loss": 1.5}
    progress.add_evaluation(1.25, 3.5, 1)
    shown = {name: value for name, value in progress.values(1.0).items() if "evaluation" in name}
    assert list(shown.values()) == [1, 1.25, 3.5]


def test_metrics_of_evaluations_are_kept_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """Each with the step of its own; what is no finite number is none, and names beyond the bound are named once."""
    reports = JobReports(Progress())
    reports.report(step=7)
    reports.report_evaluation(accuracy=torch.tensor(0.5), loss=2.0)
    reports.report_evaluation(step=9, accuracy=float("nan"), bleu="much", nothing=None)
    reports.report_evaluation(**{"a b": 1.0}, **{f"m{number}": number for number in range(evaluations.MOST)})
    reports.report_evaluation(late=1.0)
    shown = {metric.name: (metric.value, metric.step) for metric in reports.progress.evaluated_metrics()}
    assert len(shown) == evaluations.MOST
    assert (shown["loss"], shown["accuracy"], shown["bleu"], shown["m0"]) == ((2.0, 7), (None, 9), (None, 9), (0.0, 7))
    assert "'a b'" in caplog.text
    reports.report_evaluation(late=1.0)
    assert caplog.text.count("'late'") == caplog.text.count("'a b'") == 1
    assert reports.progress.values(1.0)["training_evaluation_loss"] == 2.0  # of the evaluation that had one
