"""What an earlier training, or an earlier process of the same one, has left in the directory of the checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trainmedic
import trainmedic.lightning
from tests.integration.frameworks import hf, line
from tests.support.command_sender import Sent
from trainmedic import huggingface

QUICK = huggingface.Limits(retries=2, delay=0.0, rollbacks=1)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class Killed(BaseException):
    """The process ends, before another checkpoint was written."""


def killed(_: Any) -> None:
    raise Killed


# --- Hugging Face -------------------------------------------------------------------------------------


def test_a_new_training_does_not_roll_back_to_an_old_one(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """The old weights are another model's. A checkpoint of this training with the same name is restored."""
    hf.make_trainer(tmp_path, max_steps=10, save_steps=5).train()
    script = hf.Script(at_8=sent("job.rollback"), at_12=sent("job.rollback"))
    trainer = hf.make_trainer(tmp_path, script, max_steps=15)
    assert huggingface.train(trainer, medic=medic, limits=QUICK).global_step == 15
    first, second = sent.replies()
    assert (first.status, "no complete checkpoint" in first.output["reason"]) == ("rejected", True)
    assert (second.status, second.output["checkpoint_step"]) == ("applied", 10)


def test_a_new_training_does_not_restart_from_an_old_one_after_a_crash(tmp_path: Path, medic: trainmedic.Medic) -> None:
    """It would end at once, with the old weights, as if nothing were wrong."""
    hf.make_trainer(tmp_path, max_steps=10).train()

    class Crashing(hf.Trainer):  # type: ignore[misc]
        def training_step(self, *arguments: Any, **options: Any) -> Any:
            if self.state.global_step == 5:
                raise RuntimeError("out of memory")
            return super().training_step(*arguments, **options)

    with pytest.raises(RuntimeError, match="out of memory"):
        huggingface.train(hf.make_trainer(tmp_path, cls=Crashing, max_steps=10), medic=medic, limits=QUICK)


def test_a_new_training_has_its_own_budget(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """The previous training in the same directory had used up its own."""
    for _ in range(2):
        script = hf.Script(at_7=sent("job.rollback"))
        huggingface.train(hf.make_trainer(tmp_path, script, max_steps=8, save_steps=5), medic=medic, limits=QUICK)
    assert [reply.status for reply in sent.replies()] == ["applied", "applied"]


def test_a_scaled_rate_survives_a_kill(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """It is kept though the checkpoint is older, and an undo still works. A new training has no scale."""
    plain = hf.Script()
    hf.make_trainer(tmp_path / "plain", plain, max_steps=20).train()
    script = hf.Script(at_11=sent("job.scale_lr", factor=0.3), at_14=killed)
    with pytest.raises(Killed):
        huggingface.train(hf.make_trainer(tmp_path, script, max_steps=20), medic=medic, limits=QUICK)

    def undo(_: Any) -> None:
        sent.ids.append(sent.commander.send_and_wait(medic, "job.scale_lr", undo_of=sent.ids[0], factor=1 / 0.3))

    again = hf.Script(at_15=undo)
    trainer = hf.make_trainer(tmp_path, again, max_steps=20)
    huggingface.train(trainer, medic=medic, limits=QUICK, resume_from_checkpoint=True)
    assert again.rates[:5] == pytest.approx([0.3 * rate for rate in plain.rates[10:15]])
    assert again.rates[5:] == plain.rates[15:]
    anew = hf.Script()
    huggingface.train(hf.make_trainer(tmp_path, anew, max_steps=20), medic=medic, limits=QUICK)
    assert anew.rates == plain.rates


# --- Lightning ----------------------------------------------------------------------------------------


def fit(trainer: Any, medic: trainmedic.Medic, **options: Any) -> None:
    trainmedic.lightning.fit(trainer, line.Line(), line.loader(), medic=medic, limits=QUICK, **options)


def test_a_new_fit_does_not_roll_back_to_an_old_one(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """It does not share the old one's budget either."""
    for _ in range(2):
        script = line.Script(at_4=sent("job.rollback"), at_7=sent("job.rollback"))
        fit(line.make_trainer(tmp_path, script, max_steps=9), medic)
    replies = sent.replies()
    assert [reply.status for reply in replies] == ["rejected", "applied"] * 2
    assert [reply.output["checkpoint"] for reply in replies[1::2]] == ["epoch=0-step=5.ckpt", "epoch=0-step=5-v1.ckpt"]


def test_a_rate_scaled_in_a_fit_survives_a_kill(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """It is kept though the checkpoint that is resumed from is older than the scale."""
    plain = line.Script()
    fit(line.make_trainer(tmp_path / "plain", plain, max_steps=12), medic)
    script = line.Script(at_7=sent("job.scale_lr", factor=0.5), at_8=killed)
    with pytest.raises(BaseException):  # noqa: B017 - Lightning makes of it what it likes
        fit(line.make_trainer(tmp_path, script, max_steps=12), medic)
    again = line.Script()
    fit(
        line.make_trainer(tmp_path, again, max_steps=12), medic, ckpt_path=str(tmp_path / "out" / "epoch=0-step=5.ckpt")
    )
    assert again.rates == pytest.approx([rate / 2 for rate in plain.rates[5:]])
