"""A real Trainer with the callback, and with the helper that restarts its loop, over a real Redis."""

from __future__ import annotations

import itertools
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

import trainmedic
from tests.integration.frameworks.hf import Script, Windows, make_trainer
from tests.support.command_sender import Commander, Sent
from trainmedic import huggingface
from trainmedic.huggingface.framework import split
from trainmedic.wire import envelope

QUICK = huggingface.Limits(retries=2, delay=0.0)


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in trainer.model.parameters()])


# --- rollback -----------------------------------------------------------------------------------------


def test_a_rollback_without_skip_repeats_the_run_exactly(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """The job returns from step 27 to 20: losses and final weights are the same, and the answer names the step."""
    plain = Script()
    undisturbed = make_trainer(tmp_path / "plain", plain)
    undisturbed.train()

    script = Script(at_27=sent("job.rollback", step=25))
    trainer = make_trainer(tmp_path, script)
    result = huggingface.train(trainer, medic=medic, limits=QUICK)

    assert result.global_step == 60
    assert script.steps == [*range(1, 28), *range(21, 61)]
    assert script.losses == plain.losses
    assert torch.equal(weights(trainer), weights(undisturbed))
    reply = sent.reply()
    assert (reply.status, reply.output["checkpoint"]) == ("applied", "checkpoint-20")
    assert (reply.output["step"], reply.output["left_step"], reply.output["skipped_batches"]) == (21, 27, 0)


def test_a_rollback_repeats_a_run_in_16_bits_exactly(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """On a CPU, the Trainer supports no mixed precision with fp16."""
    options = {"bf16": True, "max_steps": 12, "save_steps": 5}
    plain = Script()
    undisturbed = make_trainer(tmp_path / "plain", plain, **options)
    undisturbed.train()
    script = Script(at_8=sent("job.rollback"))
    trainer = make_trainer(tmp_path, script, **options)
    huggingface.train(trainer, medic=medic, limits=QUICK)
    assert script.steps == [*range(1, 9), *range(6, 13)]
    assert script.losses == plain.losses
    assert torch.equal(weights(trainer), weights(undisturbed))


class SaveFirst(TrainerCallback):  # type: ignore[misc]
    """The callback of docs/how-to/protect-a-training.md."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            control.should_save = True


def test_a_trainer_that_saves_its_first_step_can_roll_back_to_it(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """A fault before the first regular checkpoint is then repaired like any other."""
    plain = Script()
    undisturbed = make_trainer(tmp_path / "plain", plain, max_steps=12)
    undisturbed.train()
    script = Script(at_5=sent("job.rollback"))
    trainer = make_trainer(tmp_path, script, SaveFirst(), max_steps=12)
    huggingface.train(trainer, medic=medic, limits=QUICK)
    assert script.steps == [*range(1, 6), *range(2, 13)]
    assert script.losses == plain.losses
    assert torch.equal(weights(trainer), weights(undisturbed))
    assert sent.reply().output["checkpoint"] == "checkpoint-1"


def test_skipped_batches_stay_skipped(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """A rollback skips the next batches; a later one to a checkpoint after that does not restore them."""
    order = Windows()
    make_trainer(tmp_path / "plain", train_dataset=order).train()
    data = Windows()
    script = Script(at_27=sent("job.rollback", step=25, skip_batches=12))
    trainer = make_trainer(tmp_path, script, train_dataset=data, max_steps=-1, num_train_epochs=1)
    script.acts[34] = sent("job.rollback", step=30)
    result = huggingface.train(trainer, medic=medic, limits=QUICK)

    first, second = sent.replies()
    assert (first.output["checkpoint"], first.output["skipped_batches"]) == ("checkpoint-20", 12)
    assert (second.output["checkpoint"], second.output["skipped_batches"]) == ("checkpoint-30", 0)
    # 60 batches in the epoch: 30 steps, 12 left out, 18 to go, and so 48 steps in all.
    assert result.global_step == 48
    assert script.steps == [*range(1, 28), *range(21, 35), *range(31, 49)]
    assert data.seen[-18 * 4 :] == order.seen[-18 * 4 :]


@pytest.mark.parametrize(("accumulation", "skip"), [(1, 70), (4, 13)])
def test_a_training_with_max_steps_does_them_all(
    accumulation: int, skip: int, tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """Skipped batches cost epochs but no steps, in this process and in the next, where ``max_steps`` says how many
    there are to be."""
    options = {"gradient_accumulation_steps": accumulation, "max_steps": 60 // accumulation, "save_steps": 3}
    script = Script(at_9=sent("job.rollback", step=6, skip_batches=skip))
    trainer = make_trainer(tmp_path, script, **options)
    result = huggingface.train(trainer, medic=medic, limits=QUICK)
    assert sent.reply().output["skipped_batches"] == skip
    assert result.global_step == 60 // accumulation
    assert script.steps == [*range(1, 10), *range(7, 60 // accumulation + 1)]

    script = Script()
    trainer = make_trainer(tmp_path, script, **options)
    checkpoint = tmp_path / "out" / "checkpoint-9"
    huggingface.train(trainer, medic=medic, limits=QUICK, resume_from_checkpoint=str(checkpoint))
    assert script.steps == [*range(10, 60 // accumulation + 1)]


@pytest.mark.parametrize(("rows", "skip"), [(120, 15), (40, 25)])
def test_no_batch_to_skip_is_trained_on_across_epochs(
    rows: int, skip: int, tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """Whole epochs are skipped too, where the Trainer would end. A new process skips the same. Epochs have 30
    and 10 batches; the loader reads one ahead."""
    order = Windows(rows)
    make_trainer(tmp_path / "plain", train_dataset=order, max_steps=35 + skip).train()
    script = Script(at_23=sent("job.rollback", step=20, skip_batches=skip))
    data = Windows(rows)
    huggingface.train(make_trainer(tmp_path, script, train_dataset=data, max_steps=35), medic=medic, limits=QUICK)
    assert (sent.reply().status, sent.reply().output["skipped_batches"]) == ("applied", skip)
    assert script.steps == [*range(1, 24), *range(21, 36)]
    assert data.seen[-15 * 4 :] == order.seen[-15 * 4 :]

    resumed = Windows(rows)
    trainer = make_trainer(tmp_path, train_dataset=resumed, max_steps=35)
    checkpoint = tmp_path / "out" / "checkpoint-30"
    huggingface.train(trainer, medic=medic, limits=QUICK, resume_from_checkpoint=str(checkpoint))
    assert resumed.seen[-5 * 4 :] == order.seen[-5 * 4 :]


def test_a_rollback_goes_to_before_the_alert_by_default(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """It uses the newest complete checkpoint from before that time; half-written ones do not count."""
    moments: dict[int, datetime] = {}

    def note_time(_: Any) -> None:
        moments[25] = datetime.now(UTC)

    def roll_back(_: Any) -> None:
        (tmp_path / "out" / "checkpoint-20" / "optimizer.pt").unlink()
        sent("job.rollback", before=envelope.write_time(moments[25]))(None)

    script = Script(at_25=note_time, at_33=roll_back)
    huggingface.train(make_trainer(tmp_path, script), medic=medic, limits=QUICK)
    assert script.steps[33:] == [*range(11, 61)]
    assert sent.reply().output["checkpoint"] == "checkpoint-10"


def test_checkpoints_after_the_restored_one_are_set_aside(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """Neither the Trainer nor a later rollback continues from the abandoned part."""
    script = Script(at_35=sent("job.rollback", step=12))
    huggingface.train(make_trainer(tmp_path, script, max_steps=35, save_steps=10), medic=medic, limits=QUICK)
    names = sorted(path.name for path in (tmp_path / "out").glob("*checkpoint*"))
    assert names == [
        *("abandoned-1-checkpoint-20", "abandoned-1-checkpoint-30"),
        *("checkpoint-10", "checkpoint-20", "checkpoint-30", "checkpoint-35"),
    ]


def test_a_rollback_without_a_checkpoint_is_rejected_and_training_continues(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """Nothing is stopped for an impossible command."""
    script = Script(at_5=sent("job.rollback", step=4))
    result = huggingface.train(make_trainer(tmp_path, script, max_steps=12), medic=medic, limits=QUICK)
    assert (result.global_step, len(script.steps)) == (12, 12)
    assert (sent.reply().status, "no complete checkpoint" in sent.reply().output["reason"]) == ("rejected", True)


def test_rollbacks_to_the_same_point_are_limited(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """The one over the budget is rejected, so that the playbook escalates; training continues."""
    script = Script(at_12=sent("job.rollback"))
    twice = itertools.count()

    def again(_: Any) -> None:
        if next(twice) < 2:
            script.acts[13] = again
        sent("job.rollback", step=10)(None)

    script.acts[13] = again
    limits = huggingface.Limits(retries=2, delay=0.0, rollbacks=2)
    huggingface.train(make_trainer(tmp_path, script, max_steps=20), medic=medic, limits=limits)
    assert [reply.status for reply in sent.replies()] == ["applied", "applied", "rejected"]
    assert "budget" in sent.replies()[2].output["reason"]


def both(*sends: Any) -> Any:
    """Several commands at the end of the same step, in this order."""

    def send(control: Any) -> None:
        for each in sends:
            each(control)

    return send


def test_a_refused_rollback_keeps_the_checkpoint_for_a_restart_of_that_step(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """The batch is halved from the checkpoint of that step; the rollback may be tried again."""
    script = Script(at_15=both(sent("job.scale_batch", factor=0.5), sent("job.rollback", step=10)))
    huggingface.train(make_trainer(tmp_path, script, max_steps=20), medic=medic, limits=QUICK)
    assert [reply.status for reply in sent.replies()] == ["applied", "failed"]
    assert script.steps == [*range(1, 21)]


def test_a_refused_batch_change_saves_nothing_of_the_steps_rolled_back(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """With one checkpoint kept, saving the current step would delete the one to roll back to."""
    script = Script(at_15=both(sent("job.rollback", step=10), sent("job.scale_batch", factor=0.5)))
    trainer = make_trainer(tmp_path, script, max_steps=20, save_total_limit=1)
    huggingface.train(trainer, medic=medic, limits=QUICK)
    assert [reply.status for reply in sent.replies()] == ["applied", "failed"]
    assert script.steps == [*range(1, 16), *range(11, 21)]


def test_a_job_that_was_told_to_stop_is_not_rolled_back(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """It stops, with the requested checkpoint."""
    script = Script(at_15=both(sent("job.stop"), sent("job.rollback", step=10)))
    huggingface.train(make_trainer(tmp_path, script, max_steps=20), medic=medic, limits=QUICK)
    assert [reply.status for reply in sent.replies()] == ["applied", "failed"]
    assert script.steps == [*range(1, 16)]


# --- live ---------------------------------------------------------------------------------------------


def test_a_scaled_learning_rate_follows_its_schedule_and_persists(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """It is halved at step 15, and still half after a rollback to an earlier checkpoint."""
    plain = Script()
    make_trainer(tmp_path / "plain", plain, lr_scheduler_type="cosine").train()
    script = Script(at_15=sent("job.scale_lr", factor=0.5), at_25=sent("job.rollback", step=12))
    huggingface.train(make_trainer(tmp_path, script, lr_scheduler_type="cosine"), medic=medic, limits=QUICK)
    expected = [*plain.rates[:15], *(rate / 2 for rate in [*plain.rates[15:25], *plain.rates[10:]])]
    assert script.rates == pytest.approx(expected)
    assert [reply.status for reply in sent.replies()] == ["applied", "applied"]
    assert sent.replies()[0].output["after"] == pytest.approx(sent.replies()[0].output["before"] / 2)


def test_a_checkpoint_is_written_at_once_and_answered_when_complete(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """The callback does it alone, without the helper."""
    script = Script(at_7=sent("job.checkpoint"))
    make_trainer(tmp_path, script, huggingface.Callback(medic), max_steps=9).train()
    assert (tmp_path / "out" / "checkpoint-7" / "trainer_state.json").exists()
    assert (sent.reply().status, sent.reply().output["checkpoint"]) == ("applied", "checkpoint-7")


def test_training_stops_cleanly(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """It stops after a checkpoint, and is not restarted."""
    script = Script(at_7=sent("job.stop", checkpoint=True))
    result = huggingface.train(make_trainer(tmp_path, script), medic=medic, limits=QUICK)
    assert (result.global_step, script.steps[-1]) == (7, 7)
    assert (sent.reply().status, sent.reply().output["checkpoint"]) == ("applied", "checkpoint-7")


class NeverSaves(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        control.should_save = False


def test_a_stop_is_applied_though_another_callback_prevents_its_checkpoint(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    script = Script(at_7=sent("job.stop", checkpoint=True))
    result = make_trainer(tmp_path, script, huggingface.Callback(medic), NeverSaves()).train()
    assert result.global_step == 7
    assert (sent.reply().status, sent.reply().output["checkpoint"]) == ("applied", None)
    assert "before the checkpoint was written" in sent.reply().output["no_checkpoint"]


def test_a_pause_ends_by_command(tmp_path: Path, commander: Commander, medic: trainmedic.Medic, sent: Sent) -> None:
    """Training then continues."""
    sent_later = []

    def pause(_: Any) -> None:
        sent("job.pause", max="1h")(None)
        sent_later.append(commander.send("job.resume"))

    script = Script(at_5=pause)
    result = huggingface.train(make_trainer(tmp_path, script, max_steps=8), medic=medic, limits=QUICK)
    assert result.global_step == 8
    assert sent.reply().status == "applied"
    assert commander.final(sent_later[0]).output["was_paused"] is True


def test_a_pause_ends_after_its_duration(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """No one has to end it; the pause does not count as step time."""
    script = Script(at_5=sent("job.pause", max="100ms"))
    assert huggingface.train(make_trainer(tmp_path, script, max_steps=8), medic=medic, limits=QUICK).global_step == 8
    assert medic.progress.window_seconds["pause"] > 0.09


# --- by a restart -------------------------------------------------------------------------------------


def test_the_micro_batch_is_halved_and_the_global_batch_kept(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """With half the micro-batch and twice the accumulation no step is lost, and the losses are nearly equal."""
    plain = Script()
    make_trainer(tmp_path / "plain", plain, dropout=0.0).train()
    script = Script(at_15=sent("job.scale_batch", factor=0.5))
    trainer = make_trainer(tmp_path, script, dropout=0.0)
    huggingface.train(trainer, medic=medic, limits=QUICK)
    assert (trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps) == (2, 2)
    assert script.steps == [*range(1, 61)]
    assert script.losses == pytest.approx(plain.losses, abs=1e-4)
    reply = sent.reply()
    assert reply.status == "applied"
    assert reply.output["previous"] == {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}


def test_a_restarted_job_keeps_its_own_batches(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """An earlier process's change ended with it: undoing it here would double this one's batches."""
    first = make_trainer(tmp_path / "first", Script(at_5=sent("job.scale_batch", factor=0.5)), max_steps=8)
    huggingface.train(first, medic=medic, limits=QUICK)
    again = make_trainer(tmp_path / "again", Script(at_5=sent.undo(0, "job.scale_batch", factor=2.0)), max_steps=8)
    huggingface.train(again, medic=medic, limits=QUICK)
    assert (again.args.per_device_train_batch_size, again.args.gradient_accumulation_steps) == (4, 1)
    assert sent.replies()[1].output["nothing_to_undo"] is True


def test_loader_workers_are_changed_and_restored(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """The answer has the previous number, which the server uses for the undo."""
    script = Script(at_5=sent("job.dataloader_workers", count=1), at_8=sent("job.dataloader_workers", count=0))
    trainer = make_trainer(tmp_path, script, max_steps=10)
    huggingface.train(trainer, medic=medic, limits=QUICK)
    assert [reply.output["previous"] for reply in sent.replies()] == [0, 1]
    assert script.steps == [*range(1, 11)]
    assert trainer.args.dataloader_num_workers == 0


def test_loader_workers_are_only_lowered_and_never_raised(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """With 2 workers, then with none: the second command has nothing to lower, and the Trainer does not restart."""
    script = Script(at_5=sent("job.dataloader_workers", at_most=0), at_8=sent("job.dataloader_workers", at_most=3))
    trainer = make_trainer(tmp_path, script, max_steps=10, dataloader_num_workers=2)
    huggingface.train(trainer, medic=medic, limits=QUICK)
    lowered, refused = sent.replies()
    assert (lowered.output["previous"], lowered.output["count"]) == (2, 0)
    assert (refused.status, "nothing to lower" in refused.output["reason"]) == ("rejected", True)
    assert trainer.args.dataloader_num_workers == 0


def test_an_undo_does_not_raise_workers_lowered_by_an_earlier_process(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """The process started since then has the script's own number, which was lowered in between."""
    many = Script(at_5=sent("job.dataloader_workers", at_most=1))
    huggingface.train(
        make_trainer(tmp_path / "a", many, max_steps=8, dataloader_num_workers=2), medic=medic, limits=QUICK
    )
    none = Script(at_5=sent.undo(0, "job.dataloader_workers", count=2))
    again = make_trainer(tmp_path / "b", none, max_steps=8)
    huggingface.train(again, medic=medic, limits=QUICK)
    assert again.args.dataloader_num_workers == 0
    assert sent.replies()[1].output["nothing_to_undo"] is True


@pytest.mark.parametrize(
    ("batch", "accumulation", "factor", "expected"),
    [
        (8, 1, 0.5, (4, 2)),
        (4, 2, 2, (8, 1)),
        (6, 1, 0.5, (3, 2)),
        (8, 1, 0.01, (1, 8)),
        (3, 2, 1.4, None),
        (8, 1, 2, None),
    ],
)
def test_a_micro_batch_that_keeps_the_global_batch_is_found(
    batch: int, accumulation: int, factor: float, expected: tuple[int, int] | None
) -> None:
    """If there is none, the command is rejected."""
    if expected is None:
        with pytest.raises(trainmedic.Rejected, match="global batch"):
            split(batch, accumulation, factor)
    else:
        assert split(batch, accumulation, factor) == expected


# --- crashes ------------------------------------------------------------------------------------------


def test_a_crash_is_followed_by_a_restart_from_the_newest_checkpoint(tmp_path: Path, medic: trainmedic.Medic) -> None:
    """One restart is enough if the crash does not recur; the run ends as if nothing had happened."""

    script = Script()
    trainer = make_trainer(tmp_path, script, cls=crashing(at=[25]))
    result = huggingface.train(trainer, medic=medic, limits=QUICK)
    assert result.global_step == 60
    assert script.steps == [*range(1, 25), *range(21, 61)]


def test_a_crash_at_the_same_place_ends_the_training_after_some_attempts(
    tmp_path: Path, medic: trainmedic.Medic
) -> None:
    """The caller gets the Trainer's own error."""
    trainer = make_trainer(tmp_path, Script(), cls=crashing(at=[25] * 10))
    with pytest.raises(RuntimeError, match="out of memory"):
        huggingface.train(trainer, medic=medic, limits=QUICK)
    assert trainer.crashes == [25] * 7


def crashing(at: list[int]) -> type[Trainer]:
    """A Trainer that fails in the step after so many."""

    class Crashing(Trainer):  # type: ignore[misc]
        crashes = at

        def training_step(self, *arguments: Any, **options: Any) -> Any:
            if self.crashes and self.state.global_step == self.crashes[0] - 1:
                self.crashes.pop(0)
                raise RuntimeError("CUDA out of memory")
            return super().training_step(*arguments, **options)

    return Crashing


def test_a_failed_restart_is_answered_failed_and_reverted(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """Training continues with the previous settings."""

    class Small(Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *arguments: Any) -> Any:
            if len(inputs["input_ids"]) > 2:
                raise RuntimeError("CUDA out of memory")
            return super().training_step(model, inputs, *arguments)

    script = Script(at_15=sent("job.scale_batch", factor=2))
    trainer = make_trainer(
        tmp_path, script, cls=Small, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=20
    )
    assert huggingface.train(trainer, medic=medic, limits=QUICK).global_step == 20
    assert (sent.reply().status, "out of memory" in sent.reply().output["reason"]) == ("failed", True)
    assert trainer.args.per_device_train_batch_size == 2
    assert script.steps == [*range(1, 21)]


# --- hangs --------------------------------------------------------------------------------------------


def test_a_hung_loop_is_interrupted_for_a_rollback(tmp_path: Path, commander: Commander) -> None:
    """It restarts from the checkpoint, as after a crash; any other waiting command must be sent again."""
    sent: list[str] = []

    class Hanging(Trainer):  # type: ignore[misc]
        def training_step(self, *arguments: Any, **options: Any) -> Any:
            if self.state.global_step == 25 and not sent:
                sent.extend((commander.send("job.checkpoint"), commander.send("job.rollback")))
                time.sleep(60)
            return super().training_step(*arguments, **options)

    script = Script()
    with commander.connect(hang_floor=0.3) as medic:
        result = huggingface.train(make_trainer(tmp_path, script, cls=Hanging, max_steps=30), medic=medic, limits=QUICK)
    assert result.global_step == 30
    assert script.steps == [*range(1, 26), *range(21, 31)]
    checkpoint, rollback = (commander.final(command_id) for command_id in sent)
    assert (checkpoint.status, "hung" in checkpoint.output["reason"]) == ("rejected", True)
    assert (rollback.status, rollback.output["left_step"], rollback.output["checkpoint_step"]) == ("applied", 25, 20)


# --- capabilities and health --------------------------------------------------------------------------


def test_the_callback_alone_reports_that_it_cannot_restart(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """Commands that need a restart are unsupported, with the reason, and training continues."""
    script = Script(at_5=sent("job.rollback"))
    trainer = make_trainer(tmp_path, script, huggingface.Callback(medic), max_steps=8)
    assert trainer.train().global_step == 8
    assert (sent.reply().status, "restart of the training loop" in sent.reply().output["reason"]) == (
        "unsupported",
        True,
    )
    assert medic._describe()["capabilities"] == {
        "job.accumulate": "unsupported",
        "job.checkpoint": "live",
        "job.dataloader_workers": "unsupported",
        "job.empty_cache": "unsupported",
        "job.pause": "live",
        "job.resume": "live",
        "job.rollback": "unsupported",
        "job.scale_batch": "unsupported",
        "job.scale_lr": "live",
        "job.stop": "live",
    }


def test_every_trainer_inside_protect_can_restart(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """Also if a program creates and runs the Trainer itself; afterwards the Trainer is unchanged."""
    original = Trainer.train
    script = Script(at_15=sent("job.rollback"))
    with huggingface.protect(medic=medic, limits=QUICK):
        result = make_trainer(tmp_path, script, max_steps=20).train()
    assert (result.global_step, sent.reply().status) == (20, "applied")
    assert script.steps == [*range(1, 16), *range(11, 21)]
    assert Trainer.train is original


def test_each_step_is_reported_once_with_its_loss(tmp_path: Path, medic: trainmedic.Medic) -> None:
    """Also if the Trainer logs rarely; saving and evaluation have their own windows."""
    script = Script()
    trainer = make_trainer(
        tmp_path,
        script,
        huggingface.Callback(medic),
        max_steps=23,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=10,
        eval_dataset=Windows(8),
    )
    trainer.train()
    assert (medic.progress.step, medic.progress.steps) == (23, 23)
    values = medic.progress.values(0.0)
    assert values["training_loss"] == pytest.approx(script.losses[20])
    assert values["gradient_norm"] > 0
    assert medic.progress.checkpoint is not None
    assert medic.progress.checkpoint[0] == 23
    assert medic.progress.window is None
    assert medic.progress.window_seconds["checkpoint"] > 0
    assert medic.progress.window_seconds["evaluation"] > 0


def test_other_base_classes_of_a_users_callback_are_initialized(tmp_path: Path, medic: trainmedic.Medic) -> None:
    """They come after the callback in Python's method resolution order."""

    class Counts(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.begun = 0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun += 1

    class Both(huggingface.Callback, Counts):
        def on_step_begin(self, *arguments: Any, **options: Any) -> None:
            Counts.on_step_begin(self, *arguments, **options)
            huggingface.Callback.on_step_begin(self, *arguments, **options)

    callback = Both(medic)
    assert make_trainer(tmp_path, callback, max_steps=3).train().global_step == 3
    assert callback.begun == 3


def test_a_fault_in_the_callback_does_not_reach_the_training(
    tmp_path: Path, medic: trainmedic.Medic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is logged, and the run continues."""
    callback = huggingface.Callback(medic)
    monkeypatch.setattr(callback, "reports", None)
    assert make_trainer(tmp_path, callback, max_steps=3).train().global_step == 3
