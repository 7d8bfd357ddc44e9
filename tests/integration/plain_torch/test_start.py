"""A training can be brought back to its very beginning, before the first regular checkpoint; over a real Redis."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset

import trainmedic
import trainmedic.torch
from tests.integration.plain_torch.training import Training, same
from tests.support.command_sender import Commander
from trainmedic.recovery.checkpoints import SavedCheckpoint

Begin = Callable[..., Training]


class Noise(IterableDataset[Any]):
    """Other samples in each worker and each epoch, by the generator that the loader seeds them from."""

    def __iter__(self) -> Any:
        return iter([(torch.randn(4) + random.random(), number) for number in range(48)])


def a_warmup(optimizer: Any) -> Any:
    slow = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    return lr_scheduler.SequentialLR(optimizer, [slow, lr_scheduler.ExponentialLR(optimizer, 0.9)], [4])


class Kept(IterableDataset[Any]):
    """It keeps its place itself."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Any:
        while self.place < 48:
            self.place += 1
            yield torch.full((4,), self.place / 48), self.place
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "workers": lambda: {"workers": 2, "accumulation": 2},
    "warmup": lambda: {"scheduler": a_warmup},
    "gradient scaler": lambda: {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**40)},
    "gradient scaler, switched off": lambda: {"scaler": torch.amp.GradScaler("cpu", enabled=False)},
    "list": lambda: {"loader": [(torch.full((4, 4), n / 9), torch.arange(4) + 4 * n) for n in range(9)]},
    "kept place": lambda: {"loader": DataLoader(Kept(), batch_size=4)},
    "iterable": lambda: {
        "loader": DataLoader(Noise(), batch_size=4, num_workers=1, generator=torch.Generator().manual_seed(7))
    },
}


def steps_found(training: Training) -> list[int]:
    assert training.run.training.storage is not None
    return sorted(one.step for one in training.run.training.storage.checkpoints())


@pytest.mark.parametrize("variant", VARIANTS)
def test_back_at_the_start_the_training_is_as_before_its_first_run(begin: Begin, tmp_path: Path, variant: str) -> None:
    """The optimizer has no state again; every loss, weight, moment and sample repeats the first run."""
    calm = begin(directory=tmp_path / "calm", **VARIANTS[variant]())
    calm.train(14)
    shaken = begin(directory=tmp_path / "shaken", **VARIANTS[variant]())
    shaken.train(14, {6: shaken.order("job.rollback"), 13: shaken.order("job.rollback")})
    told, later = shaken.outputs()
    assert (told["step"], told["left_step"], told["checkpoint"]) == (0, 6, "step-00000000")
    assert later["step"] == 10
    assert told["data"].startswith("the same batches again")
    assert shaken.losses == calm.losses
    assert same(shaken.state(), calm.state())
    assert shaken.seen[-4:] == calm.seen[-4:]


def test_a_disabled_scaler_does_not_prevent_a_restart(begin: Begin) -> None:
    """Scripts are written with ``enabled=use_amp``; the precision may differ at the next start."""
    training = begin(scaler=torch.amp.GradScaler("cpu", enabled=False))
    training.train(12)
    training.run.close()
    for enabled in (False, True):
        again = begin(scaler=torch.amp.GradScaler("cpu", enabled=enabled))
        assert again.run.resume() == 10
        again.train(12)
        again.run.close()


def test_an_optimizer_without_state_gets_none(begin: Begin) -> None:
    """Zeros in its place would be moments that a first step does not have."""
    training = begin()
    training.train(4, {4: [training.order("job.rollback"), training.order("job.stop", checkpoint=False)]})
    assert training.run.global_step == 0
    assert training.optimizer.state == {}
    assert training.ema.n_averaged == 0
    assert training.scheduler.last_epoch == 0


def test_scaled_rates_and_skipped_batches_survive_a_rollback_to_the_start(begin: Begin, tmp_path: Path) -> None:
    """It counts as a rollback, and what commands changed stays changed."""
    calm = begin(directory=tmp_path / "calm")
    calm.train(9)
    training = begin(rollbacks=1)
    rate = training.order("job.scale_lr", factor=0.5)
    back = training.order("job.rollback", skip_batches=5)
    training.train(3, {2: rate, 3: [back, training.order("job.rollback")]})
    scaled, went, again = training.replies()
    assert (scaled.status, went.status, again.status) == ("applied", "applied", "rejected")
    assert "the budget is 1" in again.output["reason"]
    assert training.seen[3:] == calm.seen[5:8]
    assert training.run.training.rate.scale == 0.5


def test_the_start_checkpoint_is_written_once_before_the_first_step(begin: Begin, tmp_path: Path) -> None:
    """A second loop or a restart does not write it again, and it is deleted when there are newer ones."""
    training = begin(keep=2)
    training.train(1)
    assert steps_found(training) == [0]
    training.train(15)
    assert steps_found(training) == [0, 10]
    training.run.close()
    later = begin(keep=2)
    assert later.run.resume() == 10
    written = (tmp_path / "step-00000000").stat()
    later.train(20)
    assert steps_found(later) == [10, 20]
    assert written.st_ino != (tmp_path / "step-00000010").stat().st_ino


def test_a_loop_without_batches_has_a_start_checkpoint_too(medic: trainmedic.Medic, tmp_path: Path) -> None:
    """It is written before the first `with run.step()`."""
    model = nn.Linear(1, 1)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = trainmedic.torch.attach(medic, model=model, optimizer=optimizer, checkpoints=tmp_path, checkpoint_every=10)
    with run, run.step() as step:
        step.backward(model(torch.ones(1, 1)).sum())
        step.update()
    held = torch.load(tmp_path / "step-00000000" / "training.pt")
    assert torch.equal(held["model"]["weight"], before)
    assert held["optimizer"]["state"] == {}


@pytest.mark.parametrize("options", [{"checkpoint_at_start": False}, {"checkpoint_every": None}])
def test_the_start_checkpoint_can_be_disabled(begin: Begin, options: dict[str, Any]) -> None:
    """Checkpoints are disabled, or only this one. A rollback then reports that there is none."""
    training = begin(**options)
    training.train(5, {5: training.order("job.rollback")})
    (reply,) = training.replies()
    assert reply.status == "rejected"
    assert reply.output["reason"] == "there is no complete checkpoint; there are none at all"


def test_a_training_that_starts_from_scratch_deletes_nothing_for_it(begin: Begin) -> None:
    """A user who has forgotten to resume may notice, and still has all checkpoints."""
    first = begin(keep=3)
    first.train(30)
    assert steps_found(first) == [10, 20, 30]
    first.run.close()
    anew = begin(keep=3)
    anew.train(1)
    assert steps_found(anew) == [0, 10, 20, 30]


@pytest.mark.parametrize("ill_from", [1, 15])
def test_a_restart_skips_unhealthy_checkpoints(begin: Begin, caplog: pytest.LogCaptureFixture, ill_from: int) -> None:
    """It resumes from the checkpoint of step 0, because every later one is unhealthy. The log says
    so."""
    first = begin()

    def spoil() -> None:
        with torch.no_grad():
            first.model[0].weight[0, 0] = float("nan")

    first.train(35, {ill_from: spoil})
    first.run.close()
    second = begin()
    assert second.run.resume() == ill_from // 10 * 10
    assert all(parameter.isfinite().all() for parameter in second.model.parameters())
    assert (
        "the newest checkpoint, step-00000030, is unhealthy, and an older one is tried first: its weights"
        in caplog.text
    )


def test_the_log_reports_that_all_checkpoints_are_unhealthy(begin: Begin, caplog: pytest.LogCaptureFixture) -> None:
    first = begin()
    with torch.no_grad():
        first.model[0].weight[0, 0] = float("nan")
    first.train(25)
    first.run.close()
    assert begin().run.resume() == 20
    assert "the newest checkpoint, step-00000020, is unhealthy, and so are all others" in caplog.text


def test_user_functions_write_the_start_checkpoint_too(begin: Begin) -> None:
    """It has step 0; it is not written if the run resumes from another one."""
    written: list[SavedCheckpoint] = []

    def save(step: int, state: Any) -> None:
        written.append(SavedCheckpoint(step, datetime.now(UTC), f"mine-{step}"))

    own = trainmedic.torch.OwnCheckpoints(save, lambda found: None, lambda: written)
    begin(checkpoints=own).train(12)
    assert [one.step for one in written] == [0, 10]
    later = begin(checkpoints=own)
    assert later.run.resume() == 10
    later.train(11)
    assert [one.step for one in written] == [0, 10]


def test_training_starts_without_a_writable_start_checkpoint(begin: Begin, tmp_path: Path, caplog: Any) -> None:
    """A resume finds nothing there; and the log reports it at once, not after hours."""
    (tmp_path / "file").write_text("in the way")
    training = begin(directory=tmp_path / "file")
    assert training.run.resume() is None
    training.train(2)
    assert training.run.global_step == 2
    assert "no checkpoint of step 0" in caplog.text


def unloadable(training: Training, times: int) -> None:
    """From now on the average, which is loaded last, does not take its state so often."""
    take = training.ema.load_state_dict
    left = [times]

    def load_state_dict(state: Any) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("out of memory")
        take(state)

    training.ema.load_state_dict = load_state_dict  # type: ignore[method-assign,assignment]


def test_an_older_checkpoint_repairs_a_half_loaded_one(begin: Begin, tmp_path: Path) -> None:
    """All state is replaced, so the training continues as if the older one had been the first choice."""
    calm = begin(directory=tmp_path / "calm")
    calm.train(15)
    training = begin(directory=tmp_path / "mine")
    unloadable(training, 1)
    training.train(15, {12: training.order("job.rollback")})
    (told,) = training.outputs()
    assert told["step"] == 0
    assert told["unusable"] == ["step-00000010 was loaded in part: RuntimeError: out of memory"]
    assert training.losses == calm.losses
    assert same(training.state(), calm.state())


def test_a_half_loaded_checkpoint_without_an_older_one_ends_the_training(
    begin: Begin, commander: Commander, tmp_path: Path
) -> None:
    """It neither trains on with a mixed state nor saves it; the answer gives the reason."""
    training = begin()
    unloadable(training, 2)
    stop = training.order("job.stop")
    with pytest.raises(trainmedic.TrainmedicError, match="loaded only in part") as raised:
        training.train(15, {12: [training.order("job.rollback"), stop]})
    rolled_back, stopped = training.replies()
    assert rolled_back.status == "failed"
    for step in ("00", "10"):
        assert f"step-000000{step} was loaded in part: RuntimeError: out of memory" in rolled_back.output["reason"]
    assert "start the job again" in str(raised.value)
    assert "loaded only in part" in stopped.output["no_checkpoint"]
    assert steps_found(training) == [0, 10]
    with pytest.raises(trainmedic.TrainmedicError, match="loaded only in part"):
        training.run.checkpoint()
    again = begin()
    assert again.run.resume() == 10


def test_user_functions_say_whether_they_have_changed_anything(begin: Begin) -> None:
    """An exception may come in the middle of a load and ends the training; a refusal has changed nothing."""
    raised: list[Exception] = [trainmedic.Rejected("it lies on tape"), KeyError("model")]

    def load(found: SavedCheckpoint) -> None:
        raise raised.pop(0)

    written = [SavedCheckpoint(0, datetime.now(UTC), "mine-0")]
    own = trainmedic.torch.OwnCheckpoints(lambda step, state: None, load, lambda: written)
    training = begin(checkpoints=own, checkpoint_every=None)
    orders = {2: training.order("job.rollback"), 4: training.order("job.rollback")}
    with pytest.raises(trainmedic.TrainmedicError, match="KeyError: 'model'"):
        training.train(6, orders)
    assert training.run.global_step == 4
    assert [reply.status for reply in training.replies()] == ["failed", "failed"]
    assert "it lies on tape" in training.replies()[0].output["reason"]
