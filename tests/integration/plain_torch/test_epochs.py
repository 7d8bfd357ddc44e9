"""Loops with code between two epochs, as PyTorch's examples: it runs again after a rollback into an earlier one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import trainmedic
import trainmedic.torch
from tests.support.command_sender import Commander, Sent

EPOCHS, BATCHES = 6, 12
MOST = 3 * EPOCHS  # passes of a loop, which ends before


def begin(
    medic: trainmedic.Medic, directory: Path, samples: int = 48
) -> tuple[trainmedic.torch.Run, Callable[[], None]]:
    """Return a run, and the work on one step."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.randn(48, 4)[:samples], batch_size=4)
    settings: dict[str, Any] = {"checkpoints": directory, "checkpoint_every": 10, "keep": None}
    run = trainmedic.torch.attach(medic, loader=loader, model=model, optimizer=optimizer, **settings)
    return run, lambda: optimizer.step()


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


def test_epoch_schedules_equal_those_of_a_training_without_rollbacks(
    medic: trainmedic.Medic, sent: Sent, tmp_path: Path
) -> None:
    """Two rollbacks cross the ends of epochs."""
    calm, ended = train(medic, tmp_path / "calm")
    assert (len(calm), ended) == (EPOCHS * BATCHES, [1, 2, 3, 4, 5, 6])
    orders = {31: sent("job.rollback", step=20), 55: sent("job.rollback", step=30)}
    shaken, ended = train(medic, tmp_path / "shaken", at=orders)
    assert [reply.status for reply in sent.replies()] == ["applied", "applied"]
    assert shaken == calm
    assert ended == [1, 2, 2, 3, 4, 3, 4, 5, 6]


def test_a_loop_that_counts_its_epochs_is_told_which_code_is_not_repeated(
    medic: trainmedic.Medic, sent: Sent, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It trains for as many epochs, at another rate."""
    calm, _ = train(medic, tmp_path / "calm", own_count=True)
    shaken, _ = train(medic, tmp_path / "shaken", own_count=True, at={31: sent("job.rollback", step=20)})
    told = "does not run again after epoch 1; use: for epoch in run.epochs(count)"
    assert told in sent.reply().output["between_epochs"]
    assert told in caplog.text
    assert sorted(shaken) == sorted(calm)
    assert shaken[72][1] == pytest.approx(calm[72][1] / 0.7)


def steps_of_the_whole_training(run: trainmedic.torch.Run, epoch: int) -> Iterator[Any]:
    return run.batches(epochs=epoch + 1, steps=30)


def until_step_30(run: trainmedic.torch.Run, epoch: int) -> Iterator[Any]:
    return itertools.takewhile(lambda _: run.global_step < 30, run.batches(epochs=epoch + 1))


def without_arguments(run: trainmedic.torch.Run, epoch: int) -> Iterator[Any]:
    return run.batches()


def none(run: trainmedic.torch.Run, epoch: int) -> Iterator[Any]:
    return iter(())


@pytest.mark.parametrize(
    ("batches", "steps", "is_told"),
    [
        (steps_of_the_whole_training, [12, 24, 30], False),
        (until_step_30, [12, 24, 30], True),
        (without_arguments, [12, 24, 36, 48, 60, 72], False),
        (none, [0], False),
    ],
)
def test_epochs_end_with_the_batches_of_the_loop(
    medic: trainmedic.Medic, tmp_path: Path, caplog: pytest.LogCaptureFixture, batches: Any, steps: Any, is_told: bool
) -> None:
    run, work = begin(medic, tmp_path)
    ends: list[int] = []
    with run:
        for epoch in itertools.islice(run.epochs(EPOCHS), MOST):
            for _ in batches(run, epoch):
                with run.step():
                    work()
            ends.append(run.global_step)
    assert ends == steps
    assert (
        "run.epochs() ends, because the loop has left batches() before the end of epoch 2" in caplog.text
    ) is is_told


def test_epochs_without_batches_end(medic: trainmedic.Medic, tmp_path: Path) -> None:
    run, _ = begin(medic, tmp_path, samples=0)
    with run:
        assert [list(run.batches()) for _ in itertools.islice(run.epochs(EPOCHS), MOST)] == [[]]


@pytest.mark.parametrize("is_left", [False, True])
def test_batches_after_the_epochs_continue_across_epoch_ends(
    medic: trainmedic.Medic, tmp_path: Path, is_left: bool
) -> None:
    run, work = begin(medic, tmp_path)
    with run:
        for _ in run.epochs(2):
            for _ in run.batches():
                with run.step():
                    work()
            if is_left:
                break
        assert run.epoch == (1 if is_left else 2)
        for _ in run.batches(epochs=EPOCHS):
            with run.step():
                work()
        assert (run.epoch, run.global_step) == (EPOCHS, EPOCHS * BATCHES)


def test_an_epoch_that_ended_before_a_restart_ends_only_once(commander: Commander, tmp_path: Path) -> None:
    """The checkpoint of its last step is written before the code at its end."""
    with commander.connect() as medic:
        run, work = begin(medic, tmp_path)
        with run:
            for _ in run.batches(steps=BATCHES):
                with run.step():
                    work()
            run.checkpoint()
    with commander.connect() as medic:
        run, work = begin(medic, tmp_path)
        with run:
            assert run.resume() == BATCHES
            drawn = [(epoch, sum(1 for _ in run.batches())) for epoch in run.epochs(3)]
    assert drawn == [(0, 0), (1, BATCHES), (2, BATCHES)]


@pytest.mark.parametrize(("restarts_in", "is_whole"), [(55, True), (31, True), (31, False)])
def test_code_between_epochs_is_reported_only_if_the_loop_was_seen_to_have_it(
    commander: Commander, tmp_path: Path, caplog: pytest.LogCaptureFixture, restarts_in: int, is_whole: bool
) -> None:
    """A loop over all epochs has none, even if it was resumed in the last epoch or follows another loop."""
    for ends_at in (restarts_in, 60):
        with commander.connect() as medic:
            sent = Sent(commander, medic)
            orders = {58: sent("job.rollback", step=20)}
            run, work = begin(medic, tmp_path)
            with run:
                run.resume()
                for epochs in (5,) if is_whole else (4, 5):
                    for _ in run.batches(epochs=epochs, steps=ends_at):
                        with run.step() as step:
                            work()
                            orders.pop(step.number, int)()
    assert sent.reply().status == "applied"
    assert "between_epochs" not in sent.reply().output
    assert "code between" not in caplog.text
