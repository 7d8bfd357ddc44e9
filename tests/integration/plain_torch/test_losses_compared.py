"""The answer to a rollback says how many losses came again, is in time, and is corrected where it does not hold."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import RedisServer
from tests.integration.plain_torch.training import Training
from tests.support.command_sender import Commander
from tests.support.programs import PYTHON_PATH, Program, eventually
from trainmedic.wire.envelope import Reply

Begin = Callable[..., Training]


class Clock:
    """A clock that the test moves on."""

    def __init__(self, training: Training) -> None:
        self.now = 0.0
        training.run._verification._now = lambda: self.now

    def pass_seconds(self, seconds: float) -> Callable[[], None]:
        def act() -> None:
            self.now += seconds

        return act


def losses_of(reply: Reply) -> dict[str, Any]:
    return dict(reply.output["verified"]["losses"])


def spoil(training: Training, value: float = 50.0) -> Callable[[], None]:
    """An act that changes the weights behind the back of training."""

    def act() -> None:
        with torch.no_grad():
            training.model[0].weight.fill_(value)  # type: ignore[operator]

    return act


def test_a_slow_training_answers_with_the_comparisons_so_far(begin: Begin) -> None:
    """It answers after 30 seconds, once three losses were compared; some batches are still missing then."""
    training = begin()
    clock = Clock(training)
    later = {30 + number: clock.pass_seconds(9.0) for number in range(1, 8)}
    training.train(32, {30: training.order("job.rollback", step=10, seconds=600.0)}, later)
    (reply,) = training.replies()
    assert reply.status == "applied"
    losses = losses_of(reply)
    assert (losses["compared"], losses["agreed"]) == (4, 4)
    assert losses["why"] == "the next batches would have come too late for the answer"


def test_a_very_slow_training_waits_for_three_losses(begin: Begin) -> None:
    """It waits for 90 seconds at most. Then the answer says what was not observed."""
    training = begin()
    clock = Clock(training)
    later = {30 + number: clock.pass_seconds(25.0) for number in range(1, 8)}
    training.train(32, {30: training.order("job.rollback", step=10, seconds=600.0)}, later)
    assert losses_of(training.replies()[0])["compared"] == 3
    other = begin(directory=training.run.training.storage.directory / "other")  # type: ignore[union-attr, operator]
    clock = Clock(other)
    order = other.order("job.rollback", step=10, seconds=600.0)
    other.train(32, {30: order}, {31: clock.pass_seconds(200.0)})
    losses = losses_of(other.replies()[0])
    assert losses["compared"] == 1
    assert "too late" in losses["why"]


def test_a_later_difference_corrects_the_answer(
    commander: Commander, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server has the answer `applied` by then. The metric counts the difference and a record explains it."""
    with commander.connect(log_dir=tmp_path / "logs") as medic:
        training = Training(commander, medic, tmp_path / "checkpoints")
        clock = Clock(training)
        acts: dict[int, Callable[[], None]] = {30 + number: clock.pass_seconds(9.0) for number in range(1, 6)}
        acts[39] = spoil(training)
        training.train(45, {30: training.order("job.rollback", step=10, seconds=600.0)}, acts)
        (reply,) = training.replies()
        assert reply.status == "applied"
        assert medic.progress.rollback_not_held is True
        assert "the loss of step 20 is" in caplog.text
        training.run.close()

        def detected() -> list[dict[str, Any]]:
            lines = [line for path in (tmp_path / "logs").rglob("*.jsonl") for line in path.read_text().splitlines()]
            return [record for record in map(json.loads, lines) if record.get("event") == "detected"]

        eventually(lambda: bool(detected()), 60, "a record of the correction")
        (record,) = detected()
        assert record["message"].startswith("the rollback to step 10 does not hold: the training went back to step 10")
        assert record["command"] == reply.command_id


def test_a_confirmed_answer_needs_no_correction(begin: Begin) -> None:
    training = begin()
    clock = Clock(training)
    acts = {30 + number: clock.pass_seconds(9.0) for number in range(1, 6)}
    training.train(45, {30: training.order("job.rollback", step=10, seconds=600.0)}, acts)
    assert training.replies()[0].status == "applied"
    assert training.run.medic.progress.rollback_not_held is False


def test_weights_that_change_after_the_load_are_detected(begin: Begin) -> None:
    """The digests matched, but the losses of the training differ."""
    training = begin()
    training.train(45, {30: training.order("job.rollback", step=10)}, {31: spoil(training)})
    (reply,) = training.replies()
    assert reply.status == "failed"
    assert "it does not train as before: the loss of step 12 is" in reply.output["reason"]
    assert reply.output["verified"]["batches"] == {"compared": 16, "agreed": 16}


def test_after_a_skip_nothing_is_comparable(begin: Begin) -> None:
    data = [(torch.full((4, 4), float(number % 7)), torch.tensor([number] * 4)) for number in range(100)]
    training = begin(loader=data)
    training.train(60, {30: training.order("job.rollback", step=10, skip_batches=4)})
    (reply,) = training.replies()
    assert reply.status == "applied"
    assert losses_of(reply) == {
        "compared": 0,
        "agreed": 0,
        "finite": 20,
        "why": "not comparable: 4 batches are left out, so no step comes again",
    }


def test_a_rate_scaled_since_then_limits_the_comparison_to_the_first_loss(begin: Begin) -> None:
    """The rate is scaled before the rollback or while losses are compared."""
    training = begin()
    half = training.order("job.scale_lr", factor=0.5)
    training.train(60, {15: half, 30: training.order("job.rollback", step=10)}, {70: half})
    reply = training.replies()[1]
    assert reply.status == "applied"
    losses = losses_of(reply)
    assert losses["compared"] == 20 > losses["agreed"] >= 1
    assert "commands changed the course" in losses["why"]


def test_a_loop_error_before_three_losses_is_not_a_success(begin: Begin) -> None:
    training = begin()

    def fail() -> None:
        raise FloatingPointError

    with pytest.raises(FloatingPointError):
        training.train(45, {30: training.order("job.rollback", step=10)}, {32: fail})
    (reply,) = training.replies()
    assert reply.status == "failed"
    assert "the loop raised FloatingPointError before 3 losses were compared" in reply.output["reason"]


PROGRAM = """
import os, sys, time, torch, trainmedic, trainmedic.torch

url, moment = sys.argv[1:]
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
with trainmedic.connect(job="llm-1", redis_url=url) as medic:
    run = trainmedic.torch.attach(
        medic, model=model, optimizer=optimizer, loader=[torch.ones(2)] * 10, checkpoints="checkpoints",
        checkpoint_every=1000
    )
    if moment == "resumes":
        run.resume()
    for batch in run.batches(epochs=100_000):
        with run.step() as step:
            time.sleep(0.01)
            loss = model(batch).square().sum()
            step.backward(loss)
            step.update()
            step.report(loss=loss)
        if moment == "dies" and run.training.rollbacks and run.global_step == 2:
            os._exit(9)
"""


def test_a_job_that_dies_while_losses_are_compared_never_answers_applied(
    shared_redis: RedisServer, tmp_path: Path
) -> None:
    if shared_redis.process is None:
        shared_redis.start()
    environment = {"PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
    commander = Commander(shared_redis.url)

    def start(moment: str) -> Program:
        return Program([sys.executable, "-c", PROGRAM, shared_redis.url, moment], tmp_path / moment, environment)

    with start("dies") as job:
        sent = commander.send("job.rollback", 300.0, step=0)
        assert job.process.wait(120) == 9, job.tail()
        assert not [reply for reply in commander.replies(sent) if reply.is_final]
    with start("resumes"):
        reply = commander.final(sent, 120.0)
    commander.close()
    assert reply.status == "failed"
    assert "interrupted" in reply.output["reason"]


def test_a_checkpoint_due_at_a_rollback_is_not_written_after_it(begin: Begin, tmp_path: Path) -> None:
    """The step for which it was due was abandoned."""
    training = begin()
    training.train(33, {30: training.order("job.rollback", step=10)})
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [f"step-{step:08d}" for step in (0, 10, 20, 30)]


def smoothed(begin: Begin, spoils: bool, every: int = 1, digits: int | None = None) -> Reply:
    """Train with reports of a running mean, which no checkpoint holds; return the answer to a rollback."""
    torch.manual_seed(0)
    inputs = torch.randn(64, 4, 4)
    training = begin(loader=list(inputs))
    mean, send, trained = 0.0, training.order("job.rollback", step=10), 0
    for batch in training.run.batches(steps=45):
        with training.run.step() as step:
            loss = training.model(batch).square().mean()
            (loss / every).backward()
            if step.number % every == 0:
                training.optimizer.step()
                training.optimizer.zero_grad()
            mean = 0.9 * mean + 0.1 * loss.item()
            step.report(loss=mean if digits is None else round(mean, digits))
            trained += 1
            if trained == 32:
                send()
            if trained == 34 and spoils:
                spoil(training, 0.5)()
    (reply,) = training.replies()
    return reply


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("digits", [None, 3])
def test_a_running_mean_is_not_comparable_if_the_gradients_are_unchanged(
    begin: Begin, every: int, digits: int | None
) -> None:
    """The mean continues from the abandoned course; the training repeats exactly. An accumulation that nobody
    declared has gradients only at its updates."""
    reply = smoothed(begin, False, every, digits)
    assert reply.status == "applied", reply.output
    losses = losses_of(reply)
    assert losses["why"].startswith("not comparable: the gradients are as before")
    assert losses["gradients"]["agreed"] == losses["gradients"]["compared"] > 0
    assert losses["agreed"] < losses["compared"]


@pytest.mark.parametrize("every", [1, 4])
def test_a_running_mean_does_not_hide_another_course(begin: Begin, every: int) -> None:
    """Other weights give other gradients."""
    reply = smoothed(begin, True, every)
    assert reply.status == "failed", reply.output
    assert "it does not train as before" in reply.output["reason"]


def test_gradients_of_one_length_do_not_hide_another_course(begin: Begin) -> None:
    """A loop that scales each gradient to the norm 1 has the same norms with other weights."""
    training = begin(loader=list(torch.randn(64, 4, 4, generator=torch.Generator().manual_seed(0))))

    def step_of(batch: torch.Tensor, number: int) -> None:
        with training.run.step() as step:
            loss = training.model(batch).square().mean()
            loss.backward()
            for parameter in training.model.parameters():
                assert parameter.grad is not None
                parameter.grad /= parameter.grad.norm() + 1e-12
            training.optimizer.step()
            training.optimizer.zero_grad()
            step.report(loss=loss)
            {32: training.order("job.rollback", step=10), 34: spoil(training, 0.5)}.get(number, int)()

    for number, batch in enumerate(training.run.batches(steps=45), 1):
        step_of(batch, number)
    (reply,) = training.replies()
    assert reply.status == "failed", reply.output
    assert "it does not train as before" in reply.output["reason"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bfloat16])
def test_training_in_another_type_continues_and_is_compared(begin: Begin, dtype: torch.dtype) -> None:
    """PyTorch's norm rejects some of these types as float32."""
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    reply = train_another(begin, weight)
    assert reply.status == "applied", reply.output
    assert losses_of(reply)["agreed"] == losses_of(reply)["compared"] > 0


def test_unreadable_gradients_do_not_end_the_training(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are excluded from the comparison."""

    def refuses(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError("vector_norm")

    monkeypatch.setattr(torch.linalg, "vector_norm", refuses)
    assert train_another(begin, nn.Parameter(torch.ones(4))).status == "applied"


def train_another(begin: Begin, weight: nn.Parameter) -> Reply:
    """Train that parameter beside the model; return the answer to a rollback."""
    training = begin(loader=list(torch.randn(64, 4, 4, generator=torch.Generator().manual_seed(0))))
    training.model.register_parameter("another", weight)
    training.optimizer.add_param_group({"params": [weight]})
    for number, batch in enumerate(training.run.batches(steps=45), 1):
        with training.run.step() as step:
            loss = training.model(batch).square().mean() + weight.abs().square().sum().float()
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            step.report(loss=loss)
            if number == 32:
                training.order("job.rollback", step=10)()
    (reply,) = training.replies()
    return reply


def test_a_rate_scaled_at_the_boundary_of_a_rollback_spares_the_first_loss(begin: Begin) -> None:
    """The loss precedes its own update, so it is compared. The rate is seen in use after the rollback."""
    training = begin()
    half = training.order("job.scale_lr", factor=0.5)
    training.train(60, {30: [training.order("job.rollback", step=10), half]})
    back, scaled = training.replies()
    assert (back.status, scaled.status) == ("applied", "applied"), back.output
    losses = losses_of(back)
    assert (losses["compared"], losses["agreed"], losses["finite"]) == (1, 1, 20)
    assert "commands changed the course" in losses["why"]
    assert scaled.output["verified"]["learning_rate"]["updates"] == 2
    other = begin(directory=training.run.training.storage.directory / "other")  # type: ignore[union-attr, operator]
    half = other.order("job.scale_lr", factor=0.5)
    other.train(60, {30: [half, other.order("job.rollback", step=10)]})
    scaled, back = other.replies()
    assert (back.status, scaled.status) == ("applied", "applied"), back.output
    assert losses_of(back)["agreed"] >= 1
    assert scaled.output["verified"]["learning_rate"]["updates"] == 2
    assert other.run.lr_scale == 0.5
