"""fp16 with PyTorch's gradient scaler, as people write it: overflows skip updates, before and after a rollback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import trainmedic
import trainmedic.torch
from tests.support.command_sender import Sent

BACK, LEFT, STEPS = 10, 30, 70


class Course:
    """``scales`` by step as they last were; ``skipped`` the steps that made no update, in order."""

    def __init__(self, medic: trainmedic.Medic, directory: Path, scale: float, interval: int = 2000) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.medic = medic
        self.model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
        data = [(torch.randn(16), torch.tensor(number % 4)) for number in range(200)]
        self.scales: dict[int, float] = {}
        self.skipped: list[int] = []
        self.run = trainmedic.torch.attach(
            medic,
            model=self.model,
            optimizer=self.optimizer,
            scaler=self.scaler,
            loader=DataLoader(data, 4, shuffle=True),
            checkpoints=directory,
            checkpoint_every=10,
            keep=None,
        )

    def train(self, act: Any = None, act_at: int = LEFT, spoiled_at: int = 0) -> None:
        """``act`` is called once, after step ``act_at``; the loss of batch ``spoiled_at`` is not finite."""
        for batches, (inputs, targets) in enumerate(self.run.batches(steps=STEPS), 1):
            with self.run.step() as step:
                with torch.autocast("cpu", torch.float16):
                    loss = nn.functional.cross_entropy(self.model(inputs), targets)
                loss = loss * float("inf") if batches == spoiled_at else loss
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                self.scaler.unscale_(self.optimizer)
                norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                before = self.scaler.get_scale()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
                step.report(loss=loss, grad_norm=norm)
                self.scales[step.number] = before
                if self.scaler.get_scale() < before:
                    self.skipped.append(step.number)
            if act is not None and step.number == act_at:
                act, due = None, act
                due(None)


@pytest.mark.parametrize(("scale", "interval"), [(2.0**40, 2000), (2.0**18, 3)], ids=["high", "growing"])
def test_repeated_overflows_are_not_reported_as_differences(
    medic: trainmedic.Medic, sent: Sent, tmp_path: Path, scale: float, interval: int
) -> None:
    """The scale starts far too high, or grows into an overflow every few steps."""
    plain = Course(medic, tmp_path / "plain", scale, interval)
    plain.train()
    plain.run.close()
    course = Course(medic, tmp_path / "repaired", scale, interval)
    course.train(sent("job.rollback", step=BACK))
    course.run.close()
    reply = sent.reply()
    assert reply.status == "applied", reply.output
    losses = reply.output["verified"]["losses"]
    assert (losses["compared"], losses["agreed"], losses["finite"]) == (20, 20, 20)
    assert course.scales == plain.scales
    assert course.scaler.state_dict() == plain.scaler.state_dict()
    again = [step for step in plain.skipped if BACK < step <= LEFT]
    assert again
    assert sorted(course.skipped) == sorted([*plain.skipped, *again])


def test_a_checkpoint_between_overflows_is_healthy(medic: trainmedic.Medic, sent: Sent, tmp_path: Path) -> None:
    """Without a target step the newest is chosen although its gradients were not finite. No series shows NaN
    but for a loss that is not finite itself."""
    course = Course(medic, tmp_path, 2.0**40)
    values: list[dict[str, float]] = []

    def act(_: Any) -> None:
        values.append(medic.progress.values(0.0))
        sent("job.rollback")(None)

    course.train(act, act_at=15)
    course.run.close()
    assert {10, 15} <= {*course.skipped}
    assert "gradient_norm" not in values[0]
    assert values[0]["training_loss"] == values[0]["training_loss"]
    reply = sent.reply()
    assert reply.status == "applied", reply.output
    assert reply.output["step"] == BACK


@pytest.mark.parametrize("after", [1, 12, 20])
def test_a_non_finite_loss_within_twenty_steps_fails_the_rollback(
    medic: trainmedic.Medic, sent: Sent, tmp_path: Path, after: int
) -> None:
    """The scaler skips its update, but this is not a gradient overflow."""
    course = Course(medic, tmp_path, 2.0**16)
    course.train(sent("job.rollback", step=BACK), spoiled_at=LEFT + 1 + after)
    course.run.close()
    reply = sent.reply()
    assert reply.status == "failed", reply.output
    assert f"the loss of step {BACK + after} is not a finite number" in reply.output["reason"]
