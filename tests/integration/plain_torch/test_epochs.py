"""Loops with code between two epochs, as PyTorch's examples: it runs again after a rollback into an earlier one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import trainmedic
import trainmedic.torch
from tests.support.command_sender import Sent

EPOCHS, BATCHES = 6, 12


def train(
    medic: trainmedic.Medic, directory: Path, own_count: bool = False, at: dict[int, Callable[[], Any]] | None = None
) -> tuple[dict[int, tuple[float, float]], list[int]]:
    """Return loss and rate by step, and the number of epochs at each end of one."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    course: dict[int, tuple[float, float]] = {}
    ended, waiting = [], dict(at or {})
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    loader = DataLoader(torch.randn(48, 4), batch_size=4, shuffle=True)
    settings = {"checkpoints": directory, "checkpoint_every": 10, "keep": None}
    with trainmedic.torch.attach(medic, loader=loader, **parts, **settings) as run:
        run.resume()
        for epoch in range(run.epoch, EPOCHS) if own_count else run.epochs(EPOCHS):
            for batch in run.batches(epochs=epoch + 1):
                with run.step() as step:
                    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    course[step.number] = (loss.item(), optimizer.param_groups[0]["lr"])
                    optimizer.step()
                    step.report(loss=loss)
                    waiting.pop(step.number, int)()
            ended.append(run.epoch)
            scheduler.step()
    return course, ended


def test_the_schedule_of_each_epoch_is_that_of_a_training_without_rollbacks(
    medic: trainmedic.Medic, sent: Sent, tmp_path: Path
) -> None:
    """Two rollbacks over ends of epochs."""
    calm, ended = train(medic, tmp_path / "calm")
    assert (len(calm), ended) == (EPOCHS * BATCHES, [1, 2, 3, 4, 5, 6])
    orders = {31: sent("job.rollback", step=20), 55: sent("job.rollback", step=30)}
    shaken, ended = train(medic, tmp_path / "shaken", at=orders)
    assert [reply.status for reply in sent.replies()] == ["applied", "applied"]
    assert shaken == calm
    assert ended == [1, 2, 2, 3, 4, 3, 4, 5, 6]


def test_a_loop_that_counts_its_epochs_is_told_what_does_not_run_again(
    medic: trainmedic.Medic, sent: Sent, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It trains as many epochs, at another rate."""
    calm, _ = train(medic, tmp_path / "calm", own_count=True)
    shaken, _ = train(medic, tmp_path / "shaken", own_count=True, at={31: sent("job.rollback", step=20)})
    told = "does not run again after epoch 1; use: for epoch in run.epochs(count)"
    assert told in sent.reply().output["between_epochs"]
    assert told in caplog.text
    assert sorted(shaken) == sorted(calm)
    assert shaken[72][1] == pytest.approx(calm[72][1] / 0.7)
