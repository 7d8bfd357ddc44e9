"""A plain PyTorch training in a directory that an earlier one has used; and parts of which there are several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import trainmedic
import trainmedic.torch
from tests.integration.plain_torch.training import Training
from tests.support.command_sender import Commander
from trainmedic.recovery import checkpoints
from trainmedic.torch import randomness

Begin = Callable[..., Training]


def test_a_new_training_does_not_roll_back_to_an_old_one(begin: Begin) -> None:
    """The old weights are another model's. Rollbacks to its own checkpoints have a separate budget."""
    for _ in range(2):
        training = begin(rollbacks=1, checkpoint_at_start=False)
        training.train(15, {7: training.order("job.rollback"), 13: training.order("job.rollback")})
        first, second = training.replies()
        assert (first.status, "no complete checkpoint" in first.output["reason"]) == ("rejected", True)
        assert (second.status, second.output["step"]) == ("applied", 10)


@pytest.mark.parametrize("resumes", [True, False])
def test_a_program_that_may_have_forgotten_to_resume_is_warned(
    begin: Begin, caplog: pytest.LogCaptureFixture, resumes: bool
) -> None:
    """The warning comes before the first step, when nothing is overwritten yet."""
    old = begin()
    old.train(25)
    old.run.close()
    new = begin()
    if resumes:
        new.run.resume()
    new.train(26)
    assert ("holds 3 checkpoints of an earlier training" in caplog.text) == (not resumes)


def test_a_resumed_training_rolls_back_to_its_earlier_checkpoints(begin: Begin) -> None:
    """Checkpoints from before the point of the resume are included."""
    begin().train(25)
    training = begin()
    training.run.resume()
    training.train(25, {22: training.order("job.rollback", step=15)})
    assert training.outputs()[0]["step"] == 10


def test_losses_of_an_earlier_script_are_reported_and_decide_nothing(begin: Begin) -> None:
    """The resumed training rolls back to before the point of the resume, and its model has changed since then."""
    begin().train(25)
    training = begin()
    training.model.register_forward_hook(lambda module, inputs, output: 1.5 * output)
    training.run.resume()
    training.train(25, {22: training.order("job.rollback", step=15)})
    losses = training.outputs()[0]["verified"]["losses"]
    assert losses["compared"] > losses["agreed"]
    assert "an earlier process has trained the first of these steps" in losses["why"]


def test_a_resumed_training_finds_files_that_a_file_server_showed_late(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files written before the training started do not belong to another job."""
    begin().train(25)
    with monkeypatch.context() as briefly:
        briefly.setattr(checkpoints, "completion", lambda path: None)
        training = begin()
    training.run.resume()
    assert training.run.training.global_step == 20
    training.train(25, {22: training.order("job.rollback", step=15)})
    assert training.outputs()[0]["step"] == 10


def test_rollback_ignores_what_another_job_writes_into_the_same_directory(
    begin: Begin, commander: Commander, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other job's weights would load, but belong to another training. Neither overwrites what the other has
    written, and both say so."""
    data = [(torch.full((4, 4), float(number)), torch.tensor([number] * 4)) for number in range(50)]
    with Commander(commander.url, "llm-2").connect() as beside:
        first, other = begin(loader=data), begin(loader=data, medic=beside)
        first.train(15)
        with randomness.preserved():  # another process has random numbers of its own
            other.train(35)
        written = (tmp_path / "step-00000020" / ".trainmedic-complete").read_bytes()
        first.train(35, {31: first.order("job.rollback", step=25)})
    assert first.outputs()[0]["step"] == 10
    assert (tmp_path / "step-00000020" / ".trainmedic-complete").read_bytes() == written
    assert caplog.text.count("rollbacks ignore them") == 2
    assert "step-00000030 is there already" in caplog.text


def test_a_batch_larger_than_the_epoch_is_rejected(begin: Begin) -> None:
    """No whole batch exists, and the loop accepts only whole ones."""
    training = begin()
    training.train(4, {2: training.order("job.scale_batch", factor=100, keep_global_batch=False)})
    assert (training.replies()[0].status, training.run.training.script_batch_size) == ("rejected", 4)


def several(medic: trainmedic.Medic, directory: Path, names: tuple[str, ...] = ("a", "b")) -> trainmedic.torch.Run:
    models = {name: nn.Linear(2, 1) for name in "ab"}
    return trainmedic.torch.attach(
        medic,
        model=models,
        optimizer=[torch.optim.SGD(model.parameters(), lr=0.1) for model in models.values()],
        ema={name: swa_utils.AveragedModel(models["a"]) for name in names},
        checkpoints=directory,
    )


def one_step(run: trainmedic.torch.Run) -> None:
    with run.step() as step:
        models = [part for name, part in run.training.parts.by_name.items() if name.startswith("model.")]
        step.backward(sum((model(torch.ones(3, 2)) ** 2).mean() for model in models))  # type: ignore[arg-type]
        step.update()


def test_each_average_follows_the_model_of_its_name(medic: trainmedic.Medic, tmp_path: Path) -> None:
    """The training has several models."""
    with several(medic, tmp_path) as run:
        one_step(run)
        one_step(run)
        averages = [run.training.parts.by_name[f"ema.{name}"].module.weight for name in "ab"]
        assert not torch.equal(*averages)
        assert all(run.training.parts.by_name[f"ema.{name}"].n_averaged == 2 for name in "ab")


def test_ambiguous_objects_are_reported_to_the_program(medic: trainmedic.Medic, tmp_path: Path) -> None:
    """Examples are an average without a model of its name and several gradient scalers."""
    with several(medic, tmp_path, names=("a", "c")) as run, pytest.raises(trainmedic.ConfigurationError, match="ema"):
        one_step(run)
    model = nn.Linear(2, 1)
    run = trainmedic.torch.attach(
        medic,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        scaler=[torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")],
    )
    with run, pytest.raises(trainmedic.ConfigurationError, match="one gradient scaler"), run.step() as step:
        step.backward(model(torch.ones(3, 2)).mean())
