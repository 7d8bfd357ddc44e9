"""What a rollback of a Trainer proves, and that it claims nothing else: parameters, batches, a checkpoint's health."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import trainmedic
import trainmedic.lightning
from tests.integration.frameworks import hf, line
from tests.integration.frameworks.test_lightning import QUICK
from tests.support.command_sender import Sent
from trainmedic import huggingface
from trainmedic.job import progress
from trainmedic.wire.envelope import Reply, utc_now, write_time

# Lightning's own: it speaks to itself through what is deprecated, and advises on tiny runs.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

Train = Callable[..., Any]


def train_huggingface(directory: Path, medic: trainmedic.Medic, **acts: Any) -> hf.Script:
    """60 steps of one batch each, a checkpoint every ten."""
    data = acts.pop("data", None)
    script = hf.Script(**acts)
    huggingface.train(
        hf.make_trainer(directory, script, train_dataset=data), medic=medic, limits=huggingface.Limits(delay=0.0)
    )
    return script


def fit_lightning(directory: Path, medic: trainmedic.Medic, **acts: Any) -> line.Script:
    """The same in Lightning."""
    data = acts.pop("data", None) or line.Points(400)
    script = line.Script(**acts)
    trainer = line.make_trainer(directory, script, max_steps=60)
    trainmedic.lightning.fit(trainer, line.Line(), line.loader(data), medic=medic, limits=QUICK)
    return script


def verified(reply: Reply) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return reply.output["verified"]["parameters"], reply.output["verified"]["batches"]


@pytest.mark.parametrize("train", [train_huggingface, fit_lightning])
@pytest.mark.parametrize("skip", [0, 7])
def test_a_rollback_reports_what_was_compared(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent, train: Train, skip: int
) -> None:
    """All parameters and their optimizer state, and sixteen batches, also after the skipped ones."""
    train(tmp_path, medic, at_37=sent("job.rollback", step=10, skip_batches=skip))
    reply = sent.reply()
    parameters, batches = verified(reply)
    assert reply.status == "applied"
    assert parameters["compared"] == parameters["agreed"] > 12
    assert (parameters["ranks"], parameters.get("why")) == (1, None)
    assert batches == {"compared": 16, "agreed": 16}
    assert (reply.output["step"], reply.output["checkpoint_step"]) == (11, 10)


@pytest.mark.parametrize("train", [train_huggingface, fit_lightning])
def test_if_training_ends_first_the_answer_says_how_far_the_comparison_came(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent, train: Train
) -> None:
    """The rollback did happen, and the batches drawn until then agreed."""
    train(tmp_path, medic, at_58=sent("job.rollback", step=54))
    reply = sent.reply()
    assert reply.status == "applied"
    assert verified(reply)[1] == {"compared": 8, "agreed": 8}


@pytest.mark.parametrize(
    ("train", "data", "skipped", "compared", "why"),
    [
        (train_huggingface, hf.Windows(120), 12, 0, "and the next one may have another order"),
        (fit_lightning, line.Points(120), 12, 1, "further batches are left out around the end of the epoch"),
    ],
)
def test_a_skip_over_the_end_of_an_epoch_is_compared_up_to_there(
    tmp_path: Path,
    medic: trainmedic.Medic,
    sent: Sent,
    caplog: pytest.LogCaptureFixture,
    train: Train,
    data: Any,
    skipped: int,
    compared: int,
    why: str,
) -> None:
    """The rest is skipped in the next epoch; what comes after it is no mismatch, in the log as little as in the
    answer. Lightning has to train on the last batch of an epoch."""
    train(tmp_path, medic, data=data, at_37=sent("job.rollback", step=20, skip_batches=12))
    reply = sent.reply()
    assert (reply.status, reply.output["skipped_batches"]) == ("applied", skipped), reply.output
    batches = dict(verified(reply)[1])
    assert why in batches.pop("why")
    assert batches == {"compared": compared, "agreed": compared}
    assert "different batches follow" not in caplog.text


class Changing(hf.Windows):
    """Each reading of a row gives another one."""

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(number)
        return {name: values.roll(len(self.seen) // 120) for name, values in row.items()}


class ChangingPoints(line.Points):
    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = super().__getitem__(number)
        return x + len(self.seen) // 160, y


def test_other_batches_are_never_reported_as_applied(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """Hugging Face and Lightning both roll back, and the answer says which part did not happen."""
    train_huggingface(tmp_path / "huggingface", medic, at_37=sent("job.rollback", step=10), data=Changing())
    script = line.Script(at_37=sent("job.rollback", step=10))
    trainer = line.make_trainer(tmp_path / "lightning", script, max_steps=60)
    loader = line.loader(ChangingPoints(400))
    trainmedic.lightning.fit(trainer, line.Line(), loader, medic=medic, limits=QUICK)
    for reply in sent.replies():
        assert reply.status == "failed", reply.output
        parameters, batches = verified(reply)
        assert parameters["agreed"] == parameters["compared"] > 0
        assert batches["agreed"] < batches["compared"] == 16
        assert reply.output["reason"].startswith("the training went back to step 10, and its parameters are those of")


def flip_huggingface(checkpoint: Path) -> None:
    """One bit of one weight, in a file that is whole otherwise."""
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values())).view(torch.int32).view(-1)[0] ^= 1
    save_file(tensors, path, metadata={"format": "pt"})


def flip_lightning(checkpoint: Path) -> None:
    content = torch.load(checkpoint, weights_only=True)
    next(iter(content["state_dict"].values())).view(torch.int32).view(-1)[0] ^= 1
    torch.save(content, checkpoint)


def at_20(directory: Path) -> Path:
    (path,) = (directory / "out").glob("*[-=]20*")
    return path


@pytest.mark.parametrize(
    ("train", "flip", "expected"), [(train_huggingface, flip_huggingface, 10), (fit_lightning, flip_lightning, 15)]
)
def test_a_checkpoint_damaged_since_is_replaced_by_an_older_one(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent, train: Train, flip: Callable[[Path], None], expected: int
) -> None:
    """The loaded data differ from the saved data: no step is done with them, the next older one is restored, and the
    answer says which was damaged, with the name of the weight. Nothing goes on from that file any more."""

    def damage(_: Any) -> None:
        flip(at_20(tmp_path))

    script = train(tmp_path, medic, at_25=damage, at_27=sent("job.rollback", step=24))
    reply = sent.reply()
    parameters, batches = verified(reply)
    assert reply.status == "applied"
    assert (reply.output["checkpoint_step"], reply.output["step"]) == (expected, expected + 1)
    assert parameters["agreed"] == parameters["compared"] > 12
    assert batches["agreed"] == batches["compared"] > 0
    (why,) = reply.output["unusable"]
    assert "20" in why
    assert "was loaded otherwise than it was saved: 1 of" in why
    assert "are not as they were saved: model." in why
    assert script.steps[27] == expected + 1  # the first after 27
    assert script.steps.count(60) == 1
    assert len([path for path in (tmp_path / "out").glob("*abandoned*") if "20" in path.name]) == 1


@pytest.mark.parametrize(("train", "flip"), [(train_huggingface, flip_huggingface), (fit_lightning, flip_lightning)])
def test_training_ends_with_the_reason_if_no_checkpoint_is_intact(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent, train: Train, flip: Callable[[Path], None]
) -> None:
    """It does not continue with the loaded data, and a later process does not find the damaged one."""

    def damage(_: Any) -> None:
        for path in (tmp_path / "out").iterdir():
            if not path.name.endswith(("checkpoint-20", "step=20.ckpt")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        flip(at_20(tmp_path))

    with pytest.raises(trainmedic.TrainmedicError, match=r"20.* was loaded otherwise than it was saved: 1 of .* model"):
        train(tmp_path, medic, at_25=damage, at_27=sent("job.rollback", step=24))
    reply = sent.reply()
    assert reply.status == "failed"
    assert reply.output["reason"].endswith("there is no older one to use instead; the training ends")
    assert [path for path in (tmp_path / "out").iterdir() if "20" in path.name and "abandoned" not in path.name] == []


@pytest.mark.parametrize("train", [train_huggingface, fit_lightning])
def test_a_checkpoint_that_cannot_be_loaded_is_replaced_too(
    tmp_path: Path, medic: trainmedic.Medic, sent: Sent, train: Train
) -> None:
    """Its sizes are right, but the saved optimizer state is unreadable."""

    def damage(_: Any) -> None:
        path = at_20(tmp_path)
        with (path / "optimizer.pt" if path.is_dir() else path).open("r+b") as spoilt:
            spoilt.seek(100)
            spoilt.write(bytes(1000))

    train(tmp_path, medic, at_25=damage, at_27=sent("job.rollback", step=24))
    reply = sent.reply()
    assert reply.status == "applied"
    assert reply.output["checkpoint_step"] in (10, 15)
    (why,) = reply.output["unusable"]
    assert " cannot be loaded: " in why


class Spiking(hf.Trainer):  # type: ignore[misc]
    """Its loss is ten times as high for some steps, until it was repaired."""

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        loss = super().compute_loss(*arguments, **options)
        return loss * 10 if self.is_ill and self.state.global_step in range(33, 45) else loss

    is_ill = True


class SpikingLine(line.Line):
    is_ill = True

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = (self.layers[0](x).sum() * 0 + y.mean() * 0) + 1 + index % 7 / 100
        return loss * 10 if self.is_ill and self.global_step in range(33, 45) else loss


def spike_huggingface(directory: Path, medic: trainmedic.Medic, roll_back: Callable[[Any], None]) -> None:
    trainer = hf.make_trainer(directory, hf.Script(at_43=lambda _: roll_back(trainer)), cls=Spiking)
    huggingface.train(trainer, medic=medic, limits=huggingface.Limits(delay=0.0))


def spike_lightning(directory: Path, medic: trainmedic.Medic, roll_back: Callable[[Any], None]) -> None:
    model = SpikingLine()
    trainer = line.make_trainer(directory, line.Script(at_43=lambda _: roll_back(model)), max_steps=60)
    trainmedic.lightning.fit(trainer, model, line.loader(line.Points(400)), medic=medic, limits=QUICK)


@pytest.mark.parametrize(("train", "expected"), [(spike_huggingface, 30), (spike_lightning, 25)])
def test_a_checkpoint_from_within_the_spike_is_skipped(
    tmp_path: Path,
    medic: trainmedic.Medic,
    sent: Sent,
    monkeypatch: pytest.MonkeyPatch,
    train: Train,
    expected: int,
) -> None:
    """It is the newest from before the alert, which started late; the known losses show that it is unhealthy.
    Hugging Face has none shortly before the margin, and goes to the one right before the spike."""
    monkeypatch.setattr(progress, "TENSOR_INTERVAL", 0.0)  # these steps are quicker than any

    def roll_back(spiking: Any) -> None:
        sent("job.rollback", before=write_time(utc_now()))(None)
        spiking.is_ill = False

    train(tmp_path, medic, roll_back)
    output = sent.reply().output
    assert output["checkpoint_step"] == expected
    passed_over = {each["step"]: each["why"] for each in output["passed_over"]}
    assert "against a median of" in passed_over[40]
    within = "it is within 5 steps of step 34, at which the losses rose"
    assert passed_over.get(30) == (within if expected < 30 else None)


def test_a_resumed_process_continues_comparing(tmp_path: Path, medic: trainmedic.Medic, sent: Sent) -> None:
    """The batches drawn before the checkpoint are stored in it, and so is the health of all remaining ones."""
    first = hf.make_trainer(tmp_path, max_steps=30)
    huggingface.train(first, medic=medic)
    script = hf.Script(at_33=sent("job.rollback", step=20))
    again = hf.make_trainer(tmp_path, script)
    huggingface.train(again, medic=medic, resume_from_checkpoint=True)
    reply = sent.reply()
    assert reply.status == "applied"
    assert verified(reply)[1] == {"compared": 13, "agreed": 13}
