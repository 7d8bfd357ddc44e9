"""After a rollback of a Trainer its first losses are compared with those of before, and its rate is looked at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import Trainer, TrainerCallback

import trainmedic
import trainmedic.lightning
from tests.integration.frameworks import hf, line
from tests.integration.frameworks.test_lightning import QUICK as LIGHTNING_QUICK
from tests.support.command_sender import Sent
from trainmedic import huggingface
from trainmedic.wire.envelope import Reply

# Lightning's own: it speaks to itself through what is deprecated, and advises on tiny runs.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

Act = Callable[[Any], None]
Train = Callable[..., None]
AT, BACK, STEPS = 38, 10, 60


class Carrying(Trainer):  # type: ignore[misc]
    """It adds a value to its loss that a variable of the module carries, which no checkpoint can hold."""

    carried: ClassVar[list[torch.Tensor]] = []

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        loss = super().compute_loss(*arguments, **options)
        HIDDEN[0] = 0.9 * HIDDEN[0] + 0.1 * loss.detach()
        return loss * (1 + HIDDEN[0])


class CarryingLine(line.Line):
    """The same in Lightning."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        HIDDEN[0] = 0.9 * HIDDEN[0] + 0.1 * loss.detach()
        return loss * (1 + HIDDEN[0])


HIDDEN = [torch.zeros(())]


def train_huggingface(
    directory: Path, medic: trainmedic.Medic, carries: bool = False, callback: Any = None, **acts: Act
) -> None:
    kind = Carrying if carries else Trainer
    options = {"logging_steps": 7, "gradient_accumulation_steps": 2}
    trainer = hf.make_trainer(directory, hf.Script(**acts), cls=kind, **options)
    if callback is not None:
        trainer.add_callback(callback)
    huggingface.train(trainer, medic=medic, limits=huggingface.Limits(delay=0.0))


def fit_lightning(
    directory: Path, medic: trainmedic.Medic, carries: bool = False, callback: Any = None, **acts: Act
) -> None:
    options = {"max_steps": STEPS, "accumulate_grad_batches": 2}
    callbacks = [line.Script(**acts), *([] if callback is None else [callback])]
    trainer = line.make_trainer(directory, *callbacks, **options)
    model = CarryingLine() if carries else line.Line()
    trainmedic.lightning.fit(trainer, model, line.loader(line.Points(480)), medic=medic, limits=LIGHTNING_QUICK)


BOTH = pytest.mark.parametrize("train", [train_huggingface, fit_lightning])


def losses_of(reply: Reply) -> dict[str, Any]:
    return dict(reply.output["verified"]["losses"])


@BOTH
def test_the_losses_of_each_step_come_again(tmp_path: Path, medic: trainmedic.Medic, sent: Sent, train: Train) -> None:
    """Dropout and accumulation are on, whatever the Trainer logs: 20 of 20 agree."""
    train(tmp_path, medic, at_38=sent("job.rollback", step=BACK))
    reply = sent.reply()
    assert reply.status == "applied", reply.output
    losses = losses_of(reply)
    assert (losses["compared"], losses["agreed"], losses["finite"]) == (20, 20, 20)
    assert "why" not in losses


@BOTH
def test_undetected_state_shows_in_the_losses(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent, train: Train
) -> None:
    """Parameters and batches agree, but the training differs."""
    HIDDEN[0] = torch.zeros(())
    train(tmp_path, medic, carries=True, at_38=sent("job.rollback", step=BACK))
    reply = sent.reply()
    assert reply.status == "failed", reply.output
    assert "it does not train as before: the loss of step 11 is" in reply.output["reason"]
    assert reply.output["verified"]["batches"]["agreed"] > 0


@BOTH
@pytest.mark.parametrize("skip", [0, 4])
def test_a_non_finite_loss_is_never_applied(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent, train: Train, skip: int
) -> None:
    """Also after a skip, where no loss comes again, and although the Trainer does not log such a loss."""
    HIDDEN[0] = torch.zeros(())
    roll_back = sent("job.rollback", step=BACK, skip_batches=skip)

    def act(control: Any) -> None:
        HIDDEN[0] = torch.full((), float("nan"))
        roll_back(control)

    train(tmp_path, medic, carries=True, at_38=act)
    reply = sent.reply()
    assert reply.status == "failed", reply.output
    assert "the loss of step 11 is not a finite number" in reply.output["reason"]


@BOTH
def test_no_loss_is_comparable_after_a_skip(tmp_path: Path, medic: trainmedic.Medic, sent: Sent, train: Train) -> None:
    train(tmp_path, medic, at_38=sent("job.rollback", step=BACK, skip_batches=4))
    reply = sent.reply()
    assert reply.status == "applied", reply.output
    assert losses_of(reply) == {
        "compared": 0,
        "agreed": 0,
        "finite": 20,
        "why": "not comparable: 4 batches are left out, so no step comes again",
    }


@BOTH
def test_after_a_rate_change_only_the_first_loss_must_agree(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent, train: Train
) -> None:
    """Also at the rollback's boundary: both commands are carried out, and the answer on the rate comes later."""
    scale, back = sent("job.scale_lr", factor=0.5), sent("job.rollback", step=BACK)

    def act(control: Any) -> None:
        scale(control)
        back(control)

    train(tmp_path, medic, at_38=act)
    scaled, reply = sent.replies()
    assert reply.status == "applied", reply.output
    losses = losses_of(reply)
    assert losses["compared"] == 20 > losses["agreed"] >= 1
    assert "commands changed the course" in losses["why"]
    assert scaled.status == "applied", scaled.output
    rate = scaled.output["verified"]["learning_rate"]
    assert rate["updates"] == 2
    assert "why" not in rate


class OwnRate(TrainerCallback):
    """A callback that sets the rate at each step; ``ask`` gives the factor of commands."""

    def __init__(self, ask: Callable[[float], float] = float) -> None:
        self.ask = ask
        self.used: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **more: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.ask(1e-3 / (1 + state.global_step))
        self.used.append(optimizer.param_groups[0]["lr"] * (1 + state.global_step))


class OwnRateOfLine(line.pl.Callback):
    """The same in Lightning."""

    def __init__(self, ask: Callable[[float], float] = float) -> None:
        self.ask = ask
        self.used: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.ask(1e-3 / (1 + trainer.global_step))
        self.used.append(optimizer.param_groups[0]["lr"] * (1 + trainer.global_step))


OWN = pytest.mark.parametrize(
    ("train", "kind"), [(train_huggingface, OwnRate), (fit_lightning, OwnRateOfLine)], ids=["huggingface", "lightning"]
)


@OWN
def test_a_rate_that_the_program_sets_is_failed(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent, train: Train, kind: type[Any]
) -> None:
    callback = kind()
    train(tmp_path, medic, callback=callback, at_20=sent("job.scale_lr", factor=0.5))
    reply = sent.reply()
    assert reply.status == "failed", reply.output
    assert "the callback's learning_rate(value) returns" in reply.output["reason"]
    assert callback.used[-1] == pytest.approx(1e-3)


@OWN
def test_a_program_that_reads_the_factor_is_scaled(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent, train: Train, kind: type[Any]
) -> None:
    module = huggingface if train is train_huggingface else trainmedic.lightning
    own = module.Callback(medic)
    callback = kind(own.learning_rate)

    def both(directory: Path, **acts: Act) -> None:
        if module is huggingface:
            trainer = hf.make_trainer(directory, hf.Script(**acts), own, callback)
            huggingface.train(trainer, medic=medic, limits=huggingface.Limits(delay=0.0))
        else:
            made = line.make_trainer(directory, line.Script(**acts), own, callback, max_steps=STEPS)
            trainmedic.lightning.fit(made, line.Line(), line.loader(), medic=medic, limits=LIGHTNING_QUICK)

    both(tmp_path, at_20=sent("job.scale_lr", factor=0.5))
    reply = sent.reply()
    assert reply.status == "applied", reply.output
    assert reply.output["verified"]["learning_rate"]["updates"] == 2
    assert callback.used[-1] == pytest.approx(0.5e-3)


class Failed(RuntimeError):
    """What ends the trainings of the test below."""


def fail(_: Any) -> None:
    raise Failed


def fail_huggingface(directory: Path, medic: trainmedic.Medic, act: Act) -> None:
    trainer = hf.make_trainer(directory, hf.Script(at_20=act, at_21=fail))
    huggingface.train(trainer, medic=medic, limits=huggingface.Limits(retries=0))


def fail_lightning(directory: Path, medic: trainmedic.Medic, act: Act) -> None:
    trainer = line.make_trainer(directory, line.Script(at_20=act, at_21=fail))
    limits = trainmedic.lightning.Limits(retries=0)
    trainmedic.lightning.fit(trainer, line.Line(), line.loader(), medic=medic, limits=limits)


def fail_lightning_by_the_callback_alone(directory: Path, medic: trainmedic.Medic, act: Act) -> None:
    script = line.Script(at_20=act, at_21=fail)
    line.make_trainer(directory, script, trainmedic.lightning.Callback(medic)).fit(line.Line(), line.loader())


@pytest.mark.parametrize("train", [fail_huggingface, fail_lightning, fail_lightning_by_the_callback_alone])
def test_an_error_that_ends_a_training_ends_the_wait_for_its_rate(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent, train: Callable[..., None]
) -> None:
    """The process lives on, but no step will show the rate: the answer reports it at once."""
    with pytest.raises(Failed):
        train(tmp_path, medic, sent("job.scale_lr", factor=0.5))
    assert not medic.unanswered()
    rate = sent.reply().output["verified"]["learning_rate"]
    assert (rate["updates"], rate["why"]) == (1, "training ended")
