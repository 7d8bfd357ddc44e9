"""A real Lightning Trainer with the callback, and with the helper that restarts its fit, over a real Redis."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import trainmedic
import trainmedic.lightning
from tests.integration.frameworks.line import Line, Points, Script, loader, make_trainer
from tests.support.command_sender import Commander, Sent
from trainmedic.job import progress
from trainmedic.lightning import checkpoints

QUICK = trainmedic.lightning.Limits(retries=2, delay=0.0)

# Lightning's own: it speaks to itself through what is deprecated, and advises on tiny runs.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def fit(trainer: pl.Trainer, medic: trainmedic.Medic, data: Any = None, module: Line | None = None) -> Line:
    """Fit by the helper, which puts its callback after the script."""
    model = module or Line()
    trainmedic.lightning.fit(trainer, model, data or loader(), medic=medic, limits=QUICK)
    return model


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def test_a_rollback_without_skip_repeats_the_run_exactly(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """Across an epoch's end, losses and final weights are the same, and the answer names the step."""
    plain = Script()
    undisturbed = make_trainer(tmp_path / "plain", plain)
    model = fit(undisturbed, medic)

    script = Script(at_33=sent("job.rollback", step=22))
    again = fit(make_trainer(tmp_path, script), medic)
    assert script.steps == [*range(1, 34), *range(21, 41)]
    assert script.losses == plain.losses
    assert torch.equal(weights(again), weights(model))
    reply = sent.reply()
    assert (reply.status, reply.output["checkpoint"]) == ("applied", "epoch=0-step=20.ckpt")
    assert (reply.output["step"], reply.output["left_step"], reply.output["skipped_batches"]) == (21, 33, 0)


def test_a_rollback_repeats_a_run_in_16_bits_exactly(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """On a CPU, Lightning supports no mixed precision with fp16."""
    options = {"precision": "bf16-mixed", "max_steps": 12}
    plain = Script()
    model = fit(make_trainer(tmp_path / "plain", plain, **options), medic)
    script = Script(at_8=sent("job.rollback"))
    again = fit(make_trainer(tmp_path, script, **options), medic)
    assert script.steps == [*range(1, 9), *range(6, 13)]
    assert script.losses == plain.losses
    assert torch.equal(weights(again), weights(model))


class SaveFirst(pl.Callback):
    """The callback of docs/how-to/protect-a-training.md."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step == 0 and trainer.ckpt_path is None:
            trainer.save_checkpoint(f"{trainer.checkpoint_callback.dirpath}/step=0.ckpt")  # type: ignore[union-attr]


def test_a_programs_own_checkpoint_from_before_the_first_step_is_restored(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """The losses and the final weights are the same."""
    plain = Script()
    model = fit(make_trainer(tmp_path / "plain", plain, SaveFirst(), max_steps=12), medic)
    script = Script(at_4=sent("job.rollback"))
    again = fit(make_trainer(tmp_path, script, SaveFirst(), max_steps=12), medic)
    assert script.steps == [*range(1, 5), *range(1, 13)]
    assert script.losses == plain.losses
    assert torch.equal(weights(again), weights(model))
    assert sent.reply().output["checkpoint"] == "step=0.ckpt"


class FailsInside(Line):
    """The second of the batches that make a step fails, once."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if index % 2 and self.fails_at(self.global_step + 1):
            raise RuntimeError("CUDA out of memory")
        x, y = batch
        return torch.nn.functional.mse_loss(self.layers(x), y)


def test_a_batch_of_an_aborted_step_affects_no_later_loss(
    tmp_path: Path, medic: trainmedic.Medic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the first loss after the restart is a mean of three batches, which never recurs."""
    monkeypatch.setattr(progress, "TENSOR_INTERVAL", 0.0)  # every loss is recorded, however fast the steps are
    fit(make_trainer(tmp_path, max_steps=9, accumulate_grad_batches=2), medic, module=FailsInside())
    plain = [report.loss for report in medic.progress.record.read()]
    again = tmp_path / "again"
    fit(make_trainer(again, max_steps=9, accumulate_grad_batches=2), medic, module=FailsInside(fails_at=(6,)))
    assert [report.loss for report in medic.progress.record.read()] == plain


def test_skipped_batches_stay_skipped(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """A rollback skips the next batches; a later one to a checkpoint after that does not restore them."""
    order = Points()
    fit(make_trainer(tmp_path / "plain", max_epochs=1), medic, loader(order))
    data = Points()
    script = Script(at_12=sent("job.rollback", step=10, skip_batches=6), at_18=sent("job.rollback", step=15))
    fit(make_trainer(tmp_path, script, max_steps=-1, max_epochs=1), medic, loader(data))
    # 30 batches in the epoch: 10 steps, 6 left out, 14 to go.
    assert script.steps == [*range(1, 13), *range(11, 19), *range(16, 25)]
    assert data.seen[-9 * 4 :] == order.seen[-9 * 4 :]
    assert [reply.output["skipped_batches"] for reply in sent.replies()] == [6, 0]


def test_later_checkpoints_are_set_aside(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """Nothing continues from them."""
    script = Script(at_13=sent("job.rollback", step=7))
    fit(make_trainer(tmp_path, script, max_steps=15), medic)
    assert sorted(path.name for path in (tmp_path / "out").glob("*step=10*")) == [
        "epoch=0-step=10.ckpt",
        "epoch=0-step=10.ckpt.abandoned-1",
    ]


def test_half_written_checkpoints_are_not_restored(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """If there is no other, the rollback is rejected and training continues."""

    def cut(_: Any) -> None:
        whole = tmp_path / "out" / "epoch=0-step=5.ckpt"
        whole.write_bytes(whole.read_bytes()[:-100])
        sent("job.rollback")(None)

    script = Script(at_7=cut)
    fit(make_trainer(tmp_path, script, max_steps=9), medic)
    assert script.steps == [*range(1, 10)]
    assert (sent.reply().status, "no complete checkpoint" in sent.reply().output["reason"]) == ("rejected", True)


def test_a_scaled_learning_rate_follows_its_schedule_and_persists(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """It is halved at step 7, and still half after a rollback to an earlier checkpoint."""
    plain = Script()
    fit(make_trainer(tmp_path / "plain", plain, max_steps=15), medic)
    script = Script(at_7=sent("job.scale_lr", factor=0.5), at_12=sent("job.rollback", step=6))
    fit(make_trainer(tmp_path, script, max_steps=15), medic)
    expected = [*plain.rates[:7], *(rate / 2 for rate in [*plain.rates[7:12], *plain.rates[5:]])]
    assert script.rates == pytest.approx(expected)


def test_accumulation_changes_at_a_step_boundary(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """It is doubled after the third batch, and active from the fourth on: 26 batches are 13 more steps."""
    script = Script(at_3=sent("job.accumulate", factor=2))
    trainer = make_trainer(tmp_path, script, max_steps=-1, max_epochs=1)
    fit(trainer, medic)
    assert script.steps[-1] == 4 + 13
    assert (sent.reply().status, sent.reply().output["before"], sent.reply().output["after"]) == ("applied", 1, 2)


def test_accumulation_is_reverted_only_in_the_process_that_changed_it(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent
) -> None:
    """A process started since then has the script's own value."""
    first = make_trainer(tmp_path / "first", Script(at_3=sent("job.accumulate", factor=2)), max_steps=6)
    fit(first, medic)
    undo = sent.undo(0, "job.accumulate", factor=0.5)
    again = make_trainer(tmp_path / "again", Script(at_3=undo), max_steps=6, accumulate_grad_batches=2)
    fit(again, medic)
    assert again.accumulate_grad_batches == 2
    assert sent.replies()[1].output["nothing_to_undo"] is True


def test_a_checkpoint_a_pause_and_a_stop(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """The callback carries them out. The minimum number of epochs does not keep the fit from stopping."""
    script = Script(at_4=sent("job.checkpoint"), at_5=sent("job.pause", max="50ms"), at_7=sent("job.stop"))
    fit(make_trainer(tmp_path, script, min_epochs=1, max_steps=-1, max_epochs=3), medic)
    checkpoint, pause, stop = sent.replies()
    assert checkpoint.output["checkpoint"] == "trainmedic-step=4.ckpt"
    assert (pause.status, stop.output["checkpoint"]) == ("applied", "trainmedic-step=7.ckpt")
    assert checkpoints.is_complete(tmp_path / "out" / "trainmedic-step=7.ckpt")
    assert script.steps[-1] == 7


def test_a_crash_is_followed_by_a_restart_from_the_newest_checkpoint(tmp_path: Path, medic: trainmedic.Medic) -> None:
    """One restart is enough if it does not recur; if it recurs too often, the caller gets Lightning's error."""
    script = Script()
    fit(make_trainer(tmp_path, script, max_steps=15), medic, module=Line(fails_at=(8,)))
    assert script.steps == [*range(1, 8), *range(6, 16)]
    with pytest.raises(RuntimeError, match="out of memory"):
        fit(make_trainer(tmp_path / "again", max_steps=15), medic, module=Line(fails_at=(8,) * 9))


def test_a_hung_loop_is_interrupted_for_a_rollback(tmp_path: Path, commander: Commander) -> None:
    """It restarts from the checkpoint."""
    sent: list[str] = []

    class Hanging(Line):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if self.global_step == 12 and not sent:
                sent.append(commander.send("job.rollback"))
                time.sleep(60)
            return super().training_step(batch, index)

    script = Script()
    with commander.connect(hang_floor=0.3) as medic:
        fit(make_trainer(tmp_path, script, max_steps=15), medic, module=Hanging())
    assert script.steps == [*range(1, 13), *range(11, 16)]
    reply = commander.final(sent[0])
    assert (reply.status, reply.output["left_step"], reply.output["checkpoint_step"]) == ("applied", 12, 10)


def test_the_callback_alone_reports_that_it_cannot_restart(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """Impossible commands are unsupported, with the reason, and training continues."""
    script = Script(at_3=sent("job.rollback"), at_4=sent("job.scale_batch", factor=0.5))
    trainer = make_trainer(tmp_path, script, trainmedic.lightning.Callback(medic), max_steps=6)
    trainer.fit(Line(), loader())
    assert [reply.status for reply in sent.replies()] == ["unsupported", "unsupported"]
    assert "restart of the training loop" in sent.replies()[0].output["reason"]
    assert medic._describe()["capabilities"] == {
        "job.accumulate": "live",
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


def test_a_limit_of_one_fit_does_not_apply_to_the_next(tmp_path: Path, medic: trainmedic.Medic) -> None:
    """A model that steps its optimizers itself, then one that does not, with the same callback."""
    callback, manual = trainmedic.lightning.Callback(medic), Line()
    manual.automatic_optimization = False
    can = []
    for module in (manual, Line()):
        make_trainer(tmp_path, callback, max_steps=1, max_epochs=1).fit(module, loader())
        can.append(medic._describe()["capabilities"]["job.accumulate"])
    assert can == ["unsupported", "live"]


def test_no_fit_allows_what_the_script_forbids(tmp_path: Path, medic: trainmedic.Medic) -> None:
    """A fit does not replace a handler of the script either."""
    callback = trainmedic.lightning.Callback(medic)
    medic.cannot("job.accumulate", "the batch is fixed")
    make_trainer(tmp_path, callback, max_steps=1, max_epochs=1).fit(Line(), loader())
    assert medic._describe()["capabilities"]["job.accumulate"] == "unsupported"


def test_each_optimizer_step_is_reported(tmp_path: Path, medic: trainmedic.Medic) -> None:
    """The report has loss, norm and rate; a batch within an accumulation has no report."""
    script = Script()
    fit(make_trainer(tmp_path, script, max_steps=7, accumulate_grad_batches=2), medic)
    assert (medic.progress.step, medic.progress.steps) == (7, 7)
    values = medic.progress.values(0.0)
    assert values["gradient_norm"] > 0
    assert values["training_loss"] > 0
    assert values["training_learning_rate"] == values["training_learning_rate_expected"] == script.rates[-1]
    assert medic.progress.window is None
