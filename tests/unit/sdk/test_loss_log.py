"""Losses that come again after a rollback are those of before, within a stated tolerance, or it does not hold."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from trainmedic.job.loss_log import (
    COARSE_KERNELS,
    COMPARED,
    EXACT_KERNELS,
    NOTHING,
    LossComparison,
    LossCourse,
    LossLog,
)

NAN = float("nan")


def curve(step: int) -> float:
    return 2.0 + 1.0 / step


def trained(steps: int = 40) -> LossLog:
    """A log of a training with a checkpoint every ten steps."""
    log = LossLog()
    for step in range(1, steps + 1):
        if step % 10 == 1:
            log.expect_from(step - 1)
        if step <= log.until:
            log.note(step, curve(step))
    return log


def repeated(comparison: LossComparison, log: LossLog, factor: float = 1.0, start: int = 1) -> LossComparison:
    for step in range(comparison.step + 1, comparison.step + COMPARED + 1):
        log.note(step, curve(step) * (factor if step - comparison.step >= start else 1.0))
        comparison.step_passed(step)
    return comparison


def test_the_same_losses_agree() -> None:
    log = trained()
    comparison = repeated(log.go_back(20, LossCourse()), log)
    assert comparison.is_complete
    assert not comparison.problem
    assert comparison.result() == {"compared": 20, "agreed": 20, "finite": 20, "tolerance": EXACT_KERNELS}


@pytest.mark.parametrize(
    ("tolerance", "factor", "agrees"),
    [
        (EXACT_KERNELS, 1 + 5e-6, True),
        (EXACT_KERNELS, 1 + 5e-5, False),
        (COARSE_KERNELS, 1 + 5e-3, True),
        (COARSE_KERNELS, 1.02, False),
    ],
)
def test_the_tolerance_is_a_share_of_the_loss(tolerance: float, factor: float, agrees: bool) -> None:
    log = trained()
    comparison = repeated(log.go_back(20, LossCourse(tolerance)), log, factor)
    assert (not comparison.problem) is agrees


def test_a_later_loss_must_agree_too() -> None:
    log = trained()
    comparison = repeated(log.go_back(20, LossCourse()), log, 1.1, start=5)
    assert "the loss of step 25 is" in comparison.problem
    assert comparison.result()["compared"] == 5


def test_after_a_fault_only_the_first_must_agree() -> None:
    """A flipped bit does not come again: what differs later is told, with the reason."""
    log = trained()
    comparison = repeated(log.go_back(20, LossCourse(trouble_at=27)), log, 1.1, start=2)
    assert not comparison.problem
    member = comparison.result()
    assert (member["compared"], member["agreed"]) == (20, 1)
    assert member["why"].startswith("losses differ from step 22 on: the training went back because of a fault")
    first = repeated((log := trained()).go_back(20, LossCourse(trouble_at=27)), log, 1.1)
    assert "the loss of step 21 is" in first.problem


def test_a_fault_in_the_first_step_binds_nothing() -> None:
    log = trained()
    comparison = repeated(log.go_back(20, LossCourse(trouble_at=21)), log, 1.5)
    assert not comparison.problem


def test_losses_that_were_no_numbers_are_a_fault_of_the_course() -> None:
    """They are not to come again, and nothing is compared with them."""
    log = trained(24)
    log.note(25, NAN)
    comparison = repeated(log.go_back(20, LossCourse()), log, 1.1, start=2)
    assert not comparison.problem
    assert comparison.result()["compared"] == 4


@pytest.mark.parametrize("trouble_at", [None, 26])
@pytest.mark.parametrize("spike", [50.0, 1e6])
def test_a_spike_hides_no_difference(spike: float, trouble_at: int | None) -> None:
    """The tolerance is a share of the losses before it: else none of them could differ."""
    log = trained(25)
    log.note(26, spike)
    comparison = repeated(log.go_back(20, LossCourse(COARSE_KERNELS, trouble_at=trouble_at)), log, 1.1)
    assert "the loss of step 21 is" in comparison.problem


@pytest.mark.parametrize("at", [22, 23, 27])
def test_a_spike_need_not_come_again(at: int) -> None:
    """Also where nobody said that there was a fault: a person orders a rollback to a step by its number."""
    log = trained(30)
    log.note(at, 1e6)
    comparison = repeated(log.go_back(20, LossCourse()), log)
    assert not comparison.problem
    assert comparison.result()["agreed"] == 9
    assert "because of a fault" in comparison.result()["why"]


def test_losses_that_scatter_must_all_agree() -> None:
    log = trained()
    for step in range(21, 41):
        log.note(step, curve(step) * (1.3 if step % 3 == 0 else 1.0))
    comparison = log.go_back(20, LossCourse())
    for step in range(21, 30):
        log.note(step, curve(step) * (1.3 if step % 3 == 0 else 1.0) * (1.1 if step == 29 else 1.0))
    assert "the loss of step 29 is" in comparison.problem


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("why_not", ["", "3 batches are left out"])
@pytest.mark.parametrize("after", [1, 20])
def test_a_loss_that_is_not_finite_is_always_a_problem(value: float, why_not: str, after: int) -> None:
    """Also where nothing comes again, for twenty steps."""
    log = trained()
    comparison = log.go_back(20, LossCourse(not_comparable=why_not, trouble_at=21))
    for step in range(21, 21 + after):
        log.note(step, value if step == 20 + after else curve(step))
    assert f"the loss of step {20 + after} is not a finite number" in comparison.problem


def test_after_twenty_steps_nothing_is_looked_at() -> None:
    log = trained()
    comparison = repeated(log.go_back(20, LossCourse()), log)
    log.expect_from(40)
    log.note(41, NAN)
    assert not comparison.problem


def test_what_is_not_comparable_says_so() -> None:
    log = trained()
    comparison = repeated(log.go_back(20, LossCourse(not_comparable="3 batches are left out")), log, 1.7)
    assert comparison.result() == {
        "compared": 0,
        "agreed": 0,
        "finite": 20,
        "why": "not comparable: 3 batches are left out",
    }


def test_batches_that_are_not_known_bind_nothing_and_are_told() -> None:
    log = trained()
    comparison = repeated(log.go_back(20, LossCourse(is_known=False)), log, 1.5)
    assert not comparison.problem
    assert "it is not known whether the loop draws the same batches" in comparison.result()["why"]


def test_a_loop_that_reports_no_loss_claims_nothing() -> None:
    log = LossLog()
    log.expect_from(20)
    comparison = log.go_back(20, LossCourse())
    comparison.step_passed(40)
    assert comparison.is_complete
    assert comparison.result() == {
        "compared": 0,
        "agreed": 0,
        "finite": 0,
        "why": "no loss was reported for these steps before",
    }


def test_a_command_ends_what_must_agree() -> None:
    """One of before, as far as it was after the checkpoint, and one that comes while losses are compared."""
    log = trained()
    log.note_course_change(30)
    assert (log.first_changed_step(20), log.first_changed_step(35)) == (31, None)
    comparison = repeated(log.go_back(20, LossCourse(changed_at=log.first_changed_step(20))), log, 1.5, start=11)
    assert not comparison.problem
    assert "commands changed the course" in comparison.result()["why"]
    log = trained()
    comparison = log.go_back(20, LossCourse())
    log.note(21, curve(21))
    log.note_course_change(21)
    log.note(22, 5.0)
    assert not comparison.problem
    assert comparison.result()["compared"] == 1


def test_a_command_that_spares_the_next_loss_changes_the_one_after() -> None:
    """Also after a restart."""
    log = trained()
    log.note_course_change(30, spares_next=True)
    assert log.first_changed_step(20) == 32
    log.go_back(30, LossCourse())
    (again := LossLog()).restore(json.loads(json.dumps(log.state())), 30)
    assert (again.first_changed_step(20), again.first_changed_step(30)) == (32, None)
    again.note_course_change(30)
    assert again.first_changed_step(20) == 31
    again.restore({"losses": [], "changes": [30]}, 30)
    assert again.first_changed_step(20) == 31


def test_only_what_follows_a_checkpoint_is_noted() -> None:
    """The rest costs the loop nothing."""
    log = LossLog()
    log.expect_from(0)
    log.expect_from(100)
    assert log.until == 120
    log.go_back(0, LossCourse())
    assert log.until == COMPARED


def test_a_restart_knows_the_losses_from_before_it() -> None:
    state = json.loads(json.dumps(trained(35).state()))
    log = LossLog()
    log.restore(state, 35)
    comparison = repeated(log.go_back(20, LossCourse()), log)
    assert comparison.result()["compared"] == 15
    log.restore(None, 35)
    assert log.go_back(20, LossCourse()).result()["compared"] == 0


def test_a_loss_that_is_no_number_before_any_rollback_is_in_no_comparison() -> None:
    """Trainings that compare no losses, and other trainings of the process, share what stands for none."""
    log = LossLog()
    log.expect_from(0)
    for step, loss in ((1, 1.0), (2, float("nan")), (30, 2.0)):
        log.note(step, loss)
        log.comparison.step_passed(step)
    log.note_course_change(30)
    assert log.comparison is NOTHING
    assert NOTHING.not_finite_at is None
    assert not NOTHING.problem
    assert NOTHING.result() == {
        "compared": 0,
        "agreed": 0,
        "finite": 0,
        "why": "not comparable: there was no rollback",
    }


def test_losses_of_an_earlier_process_are_told_and_bind_nothing() -> None:
    """Its script may have had another schedule. What this process has trained binds."""
    (log := LossLog()).restore(trained(25).state(), 25)
    comparison = repeated(log.go_back(20, LossCourse()), log, 1.1)
    assert not comparison.problem
    assert "an earlier process has trained the first of these steps" in comparison.result()["why"]
    log.expect_from(30)
    repeated(LossComparison(30, {}, LossCourse()), log)
    comparison = repeated(log.go_back(30, LossCourse()), log, 1.1)
    assert comparison.problem


@pytest.mark.parametrize("step", [20, 22])
def test_what_this_process_has_repeated_binds_though_an_earlier_one_had_come_further(step: int) -> None:
    """A second rollback below the step of the restart is to losses of this process, and does not say otherwise."""
    (log := LossLog()).restore(trained(25).state(), 25)
    repeated(log.go_back(20, LossCourse()), log, 1.1)
    comparison = log.go_back(step, LossCourse())
    for at in range(step + 1, 31):
        log.note(at, curve(at) * 1.3)
        comparison.step_passed(at)
    assert f"the loss of step {step + 1} is" in comparison.problem
    assert "earlier process" not in comparison.result().get("why", "")


def noted(log: LossLog, comparison: LossComparison, loss: float, norms: list[float]) -> None:
    step = comparison.step + 1 + len(comparison.compared)
    log.note(step, curve(step) * loss)
    log.note_gradients(step, norms)
    comparison.step_passed(step)


def test_other_losses_with_the_same_gradients_are_not_comparable() -> None:
    """A running mean. With other gradients, or with none to compare, the loss stands against the rollback."""
    log = trained()
    for step in range(21, 41):
        log.note_gradients(step, [1.0, 2.0])
    comparison = log.go_back(20, LossCourse())
    for _ in range(3):
        noted(log, comparison, 1.1, [1.0, 2.0])
    assert not comparison.problem
    assert comparison.result()["gradients"] == {"compared": 3, "agreed": 3}
    assert comparison.result()["why"].startswith("not comparable: the gradients are as before")
    noted(log, comparison, 1.1, [1.0, 2.1])
    assert "the loss of step 24 is" in comparison.problem


@pytest.mark.parametrize("loss", [torch.ones(3), (1.0, 2.0), {"loss": 1.0}, "1.0", 1j, torch.tensor(1j)])
def test_what_is_no_number_is_no_loss(loss: Any) -> None:
    """Such as the losses of each sample: it is not said that they are not finite."""
    log = LossLog()
    log.note(1, loss)
    comparison = log.go_back(0, LossCourse())
    log.note(1, loss)
    assert not comparison.problem
    assert comparison.result()["why"] == "no loss was reported for these steps before"


def test_a_loss_that_gradients_explain_did_not_agree() -> None:
    """The problem does not count it, and does not call the next one the first."""
    log = trained()
    for step in range(21, 41):
        log.note_gradients(step, [1.0, 2.0])
    comparison = log.go_back(20, LossCourse())
    noted(log, comparison, 1.1, [1.0, 2.0])
    noted(log, comparison, 1.1, [1.0, 2.1])
    assert comparison.problem.endswith(f"and was {curve(22):.8g} before")


def test_gradients_of_zero_explain_no_other_loss() -> None:
    """Behind a layer that begins with zeros, as LoRA's do, they are zero whatever the batch is."""
    log = trained()
    log.note_gradients(21, [0.0, 0.0])
    comparison = log.go_back(20, LossCourse())
    noted(log, comparison, 1.1, [0.0, 0.0])
    assert "the loss of step 21 is" in comparison.problem


def test_a_loss_waits_for_the_gradients_of_the_next_update() -> None:
    """Where no update comes any more, the loss stands."""
    log = trained()
    log.note_gradients(24, [1.0])
    comparison = log.go_back(20, LossCourse())
    log.note(21, 5.0)
    assert not comparison.is_complete
    assert "the loss of step 21 is" in comparison.problem
    log.note_gradients(24, [1.0])
    assert not comparison.problem
