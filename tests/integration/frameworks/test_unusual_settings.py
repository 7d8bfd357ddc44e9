"""Settings of the Trainers that make a command impossible, or a repair dangerous: told truthfully, and survived."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from transformers import Trainer, TrainerCallback

import trainmedic
import trainmedic.lightning
from tests.integration.frameworks import hf, line
from tests.support.command_sender import Sent
from tests.support.programs import eventually
from trainmedic import huggingface
from trainmedic.lightning.checkpoints import is_complete

QUICK = huggingface.Limits(retries=1, delay=0.0)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


# --- Hugging Face -------------------------------------------------------------------------------------


def test_no_checkpoint_is_requested_if_the_disk_lacks_space_for_it(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training would fail because of a command. A stop stops without a checkpoint."""
    script = hf.Script(
        at_5=sent("job.checkpoint"), at_6=sent("job.scale_batch", factor=0.5), at_8=sent("job.stop", checkpoint=True)
    )
    trainer = hf.make_trainer(tmp_path, script, max_steps=10, save_steps=3, save_total_limit=1)
    monkeypatch.setattr("trainmedic.huggingface.checkpoints.shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    assert huggingface.train(trainer, medic=medic, limits=QUICK).global_step == 8
    checkpoint, scaled, stopped = sent.replies()
    assert [checkpoint.status, scaled.status, stopped.status] == ["rejected", "rejected", "applied"]
    assert "checkpoint-3 takes" in checkpoint.output["reason"]
    assert stopped.output["checkpoint"] is None
    assert "1,000 left" in stopped.output["no_checkpoint"]


def test_a_trainer_that_saves_only_the_model_is_not_restarted(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """It reports this in advance; training continues."""
    script = hf.Script(
        at_5=sent("job.scale_batch", factor=0.5),
        at_6=sent("job.dataloader_workers", count=1),
        at_7=sent("job.rollback"),
        at_8=sent("job.checkpoint"),
    )
    trainer = hf.make_trainer(tmp_path, script, max_steps=10, save_steps=3, save_only_model=True)
    assert huggingface.train(trainer, medic=medic, limits=QUICK).global_step == 10
    replies = sent.replies()
    assert [reply.status for reply in replies] == ["unsupported"] * 3 + ["applied"]
    assert all("save_only_model" in reply.output["reason"] for reply in replies[:3])


class SavesLess(Trainer):  # type: ignore[misc]
    """A user's Trainer that writes the weights itself, as those that train adapters do, and no optimizer."""

    def _save_checkpoint(self, *_: Any, **__: Any) -> None:
        self.save_model(f"{self.args.output_dir}/checkpoint-{self.state.global_step}", _internal_call=True)


class SavesElsewhere(Trainer):  # type: ignore[misc]
    def _get_output_dir(self, *_: Any, **__: Any) -> str:
        return f"{self.args.output_dir}/run-0"


def test_a_checkpoint_is_reported_once_every_rank_has_written(tmp_path: Path, medic: trainmedic.Medic) -> None:
    """Rank 0 looks again after a step, and no other rank reports. The test creates rank 1's files."""
    trainer = hf.make_trainer(tmp_path, max_steps=3, save_steps=3)
    trainer.train()
    checkpoint = tmp_path / "out" / "checkpoint-3"
    (checkpoint / "rng_state.pth").rename(checkpoint / "rng_state_0.pth")
    callback = huggingface.Callback(medic)

    def save(should_save: bool) -> Any:
        args = SimpleNamespace(
            output_dir=str(tmp_path / "out"), should_save=should_save, save_only_model=False, world_size=2
        )
        callback.on_save(args, trainer.state, trainer.control)
        return args

    save(should_save=False)
    args = save(should_save=True)
    assert medic.progress.checkpoint is None
    shutil.copy(checkpoint / "rng_state_0.pth", checkpoint / "rng_state_1.pth")
    callback._report_saved(args)
    assert medic.progress.checkpoint is not None
    assert medic.progress.checkpoint[0] == 3


@pytest.mark.parametrize("cls", [SavesLess, SavesElsewhere])
def test_a_save_that_cannot_be_resumed_from_is_not_a_checkpoint(
    cls: type[Trainer], tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """A playbook may drain the node next. A stop stops without a checkpoint."""
    script = hf.Script(at_3=sent("job.checkpoint"), at_5=sent("job.stop", checkpoint=True))
    trainer = hf.make_trainer(tmp_path, script, cls=cls, max_steps=8, save_strategy="no")
    assert huggingface.train(trainer, medic=medic, limits=QUICK).global_step == 5
    saved, stopped = sent.replies()
    assert (saved.status, stopped.status) == ("failed", "applied")
    assert "checkpoint-3 is missing, or lacks files" in saved.output["reason"]
    assert stopped.output["checkpoint"] is None
    assert "checkpoint-5 is missing, or lacks files" in stopped.output["no_checkpoint"]
    assert medic.progress.checkpoint is None


def test_the_loss_is_known_if_it_is_logged_per_epoch(tmp_path: Path, medic: trainmedic.Medic) -> None:
    """The Trainer logs it after the last step was reported."""
    trainer = hf.make_trainer(tmp_path, max_steps=-1, num_train_epochs=1, logging_strategy="epoch", save_strategy="no")
    huggingface.train(trainer, medic=medic, limits=QUICK)
    values = medic.progress.values(0.0)
    assert values["training_loss"] > 0
    assert values["gradient_norm"] > 0
    assert medic.progress.steps == 60


def test_more_workers_than_the_machine_can_bear_are_rejected(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """The command is rejected before any restart."""
    script = hf.Script(at_2=sent("job.dataloader_workers", count=1_000_000))
    huggingface.train(hf.make_trainer(tmp_path, script, max_steps=4), medic=medic, limits=QUICK)
    assert (sent.reply().status, script.steps) == ("rejected", [1, 2, 3, 4])


def test_nothing_else_is_saved_once_a_rollback_was_ordered(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """The state of the loop is about to be discarded."""

    def both(control: Any) -> None:
        sent("job.rollback")(control)
        sent("job.checkpoint")(control)

    script = hf.Script(at_7=both)
    huggingface.train(hf.make_trainer(tmp_path, script, max_steps=9, save_steps=5), medic=medic, limits=QUICK)
    assert [reply.status for reply in sent.replies()] == ["applied", "rejected"]
    assert not list((tmp_path / "out").glob("*checkpoint-7"))


@pytest.mark.parametrize("skip_batches", [0, 2])
def test_a_checkpoint_that_vanishes_before_the_restart_does_not_end_the_run(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent, skip_batches: int
) -> None:
    """The rollback fails; training continues from the newest existing one."""

    class Cleaner(TrainerCallback):  # type: ignore[misc]
        def on_train_end(self, *_: Any, **__: Any) -> None:
            shutil.rmtree(tmp_path / "out" / "checkpoint-5", ignore_errors=True)

    script = hf.Script(at_13=sent("job.rollback", step=7, skip_batches=skip_batches))
    trainer = hf.make_trainer(tmp_path, script, Cleaner(), max_steps=15, save_steps=5)
    assert huggingface.train(trainer, medic=medic, limits=QUICK).global_step == 15
    assert (sent.reply().status, "no longer exists" in sent.reply().output["reason"]) == ("failed", True)
    assert script.steps == [*range(1, 14), *range(11, 16)]


# --- Lightning ----------------------------------------------------------------------------------------


def trainer_with(directory: Path, script: line.Script, **keep: Any) -> pl.Trainer:
    trainer = line.make_trainer(directory, script, max_steps=40)
    trainer.callbacks[-1] = ModelCheckpoint(dirpath=directory / "out", **keep)
    return trainer


def fit(trainer: pl.Trainer, medic: trainmedic.Medic, model: Any = None) -> None:
    trainmedic.lightning.fit(trainer, model or line.Line(), line.loader(), medic=medic, limits=QUICK)


def test_lightning_does_not_delete_the_checkpoint_to_restore(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """It keeps one checkpoint, of the last epoch, and would mistake the early end for an epoch's."""
    script = line.Script(at_33=sent("job.rollback"))
    fit(trainer_with(tmp_path, script, every_n_epochs=1), medic)
    assert (sent.reply().status, sent.reply().output["checkpoint_step"]) == ("applied", 30)
    assert script.steps == [*range(1, 34), *range(31, 41)]


class SlowIO(TorchCheckpointIO):
    """Takes a second for each checkpoint, so that steps pass meanwhile."""

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        time.sleep(1.0)
        super().save_checkpoint(*arguments, **options)


def test_a_background_checkpoint_is_awaited(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """A playbook may drain the node next."""
    there: list[bool] = []
    script = line.Script(at_3=sent("job.checkpoint"), at_6=lambda _: there.extend(map(is_complete, written())))

    def written() -> list[Path]:
        return [tmp_path / "out" / sent.reply().output["checkpoint"]]

    fit(line.make_trainer(tmp_path, script, max_steps=7, plugins=[AsyncCheckpointIO(SlowIO())]), medic)
    assert (sent.reply().status, there) == ("applied", [True])


class HeldIO(TorchCheckpointIO):
    """Writes no checkpoint before `written` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        assert self.written.wait(120.0)
        super().save_checkpoint(*arguments, **options)


def test_a_background_checkpoint_is_reported_once_it_is_complete(tmp_path: Path, medic: trainmedic.Medic) -> None:
    """Steps continue during this time."""
    held = HeldIO()
    seen: list[Any] = []

    def write(_: Any) -> None:
        seen.append(medic.progress.checkpoint)
        held.written.set()
        eventually(lambda: is_complete(tmp_path / "out" / "epoch=0-step=5.ckpt"), 120, "the checkpoint")

    script = line.Script(at_7=write, at_8=lambda _: seen.append(medic.progress.checkpoint))
    fit(line.make_trainer(tmp_path, script, max_steps=9, plugins=[AsyncCheckpointIO(held)]), medic)
    assert seen[0] is None
    assert seen[1] is not None
    assert seen[1][0] == 5


class LookingIO(TorchCheckpointIO):
    """``seen`` is what was reported when each checkpoint was written."""

    def __init__(self, medic: trainmedic.Medic) -> None:
        super().__init__()
        self.medic = medic
        self.seen: list[Any] = []

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        super().save_checkpoint(*arguments, **options)
        self.seen.append((self.medic.progress.checkpoint or [None])[0])


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_checkpoint_is_reported_after_it_was_written(
    tmp_path: Path, medic: trainmedic.Medic, weights_only: bool
) -> None:
    """Not before, not if the training cannot resume from it; also by the callback alone, which leaves the Trainer
    as it was."""
    looking = LookingIO(medic)
    trainer = line.make_trainer(tmp_path, trainmedic.lightning.Callback(medic), max_steps=11, plugins=[looking])
    keep = ModelCheckpoint(tmp_path / "out", every_n_train_steps=5, save_top_k=-1, save_weights_only=weights_only)
    trainer.callbacks[-1] = keep
    trainer.fit(line.Line(), line.loader())
    assert looking.seen == ([None, None] if weights_only else [None, 5])
    assert (medic.progress.checkpoint or [None])[0] == (None if weights_only else 10)
    assert "save_checkpoint" not in vars(trainer)


class WithoutOptimizers(line.Line):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["optimizer_states"]


def test_a_lightning_checkpoint_without_optimizers_does_not_count(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """The model's own hook has removed them to save space."""
    script = line.Script(at_3=sent("job.checkpoint"))
    fit(line.make_trainer(tmp_path, script, max_steps=4), medic, WithoutOptimizers())
    assert (sent.reply().status, "without the optimizers" in sent.reply().output["reason"]) == ("failed", True)


def test_weights_alone_are_not_restored(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """Lightning cannot resume from them; it can from a checkpoint that a command saved."""
    script = line.Script(at_12=sent("job.rollback"), at_14=sent("job.checkpoint"), at_17=sent("job.rollback"))
    fit(trainer_with(tmp_path, script, every_n_train_steps=5, save_top_k=-1, save_weights_only=True), medic)
    assert [reply.status for reply in sent.replies()] == ["rejected", "applied", "applied"]
    assert sent.replies()[2].output["checkpoint"] == "trainmedic-step=14.ckpt"
    assert script.steps[-1] == 40


def test_a_model_with_manual_optimization_cannot_be_told_to_accumulate(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """Lightning's number has no effect then, which is reported. The rest works."""

    class Manual(line.Line):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return {"loss": loss}

    script = line.Script(
        at_3=sent("job.accumulate", factor=2), at_4=sent("job.scale_lr", factor=0.5), at_7=sent("job.rollback")
    )
    fit(line.make_trainer(tmp_path, script, max_steps=9), medic, Manual())
    assert [reply.status for reply in sent.replies()] == ["unsupported", "applied", "applied"]
    assert medic._describe()["capabilities"]["job.accumulate"] == "unsupported"
    assert medic.progress.values(0.0)["training_loss"] > 0


@pytest.mark.parametrize("factor", [0.3, 1e300])
def test_an_impossible_accumulation_is_rejected(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent, factor: float
) -> None:
    """A step cannot be part of a batch, or more batches than will ever come."""
    script = line.Script(at_2=sent("job.accumulate", factor=factor))
    fit(line.make_trainer(tmp_path, script, max_steps=4), medic)
    assert sent.reply().status == "rejected"
