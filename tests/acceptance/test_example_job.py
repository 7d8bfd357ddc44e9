"""The training example does what its handlers promise: it goes back exactly, and stays changed as told."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from examples import train_char_model as example  # noqa: E402 (needs torch)

# PyTorch says so where NumPy is not installed; nothing here needs it.
pytestmark = pytest.mark.filterwarnings("ignore:Failed to initialize NumPy")


@pytest.fixture
def training(tmp_path: Path) -> example.Training:
    batches = example.Batches(Path(__file__).read_text(), poisoned=range(0))
    return example.Training(batches, learning_rate=0.01, directory=tmp_path)


def trained(training: example.Training, steps: int) -> float:
    """The loss of the last of that many steps."""
    return [training.train()[0] for _ in range(steps)][-1]


def saved(training: example.Training, at: float) -> Path:
    """A checkpoint that was complete at that time, in seconds since the epoch."""
    path = training.save()
    os.utime(path, (at, at))
    return path


def test_after_a_rollback_the_same_data_gives_the_same_losses(training: example.Training) -> None:
    """Weights, optimizer and place in the data are those of the checkpoint, to the bit."""
    trained(training, 3)
    path = training.save()
    first = [training.train()[0] for _ in range(3)]
    training.roll_back(path, skip_batches=0)
    assert [training.train()[0] for _ in range(3)] == first


def test_skipped_batches_are_not_seen_again(training: example.Training) -> None:
    """The step goes back, the data goes on."""
    trained(training, 2)
    training.roll_back(training.save(), skip_batches=7)
    assert (training.step, training.next_batch) == (2, 9)


def test_a_scaled_learning_rate_survives_a_rollback(training: example.Training) -> None:
    """A checkpoint holds the old rate; going back to it does not bring that back."""
    path = training.save()
    training.scale_lr(0.5)
    training.roll_back(path, skip_batches=0)
    assert training.learning_rate == pytest.approx(0.005)
    again = training.save()
    training.roll_back(again, skip_batches=0)
    assert training.learning_rate == pytest.approx(0.005)


def test_the_newest_checkpoint_from_before_is_found(training: example.Training) -> None:
    """By time, by step, by distance; an unfinished file is none."""
    (training.directory / "step-0000099.unfinished").write_bytes(b"half of it")
    early = saved(training, 1000)
    trained(training, 2)
    late = saved(training, 2000)

    def before(seconds: float) -> dict[str, str]:
        return {"before": datetime.fromtimestamp(seconds, UTC).isoformat()}

    assert training.checkpoint_for(before(1500)) == early
    assert training.checkpoint_for(before(2500)) == late
    assert training.checkpoint_for(before(500)) is None
    assert training.checkpoint_for({"step": 1}) == early
    assert training.checkpoint_for({"steps_back": 2}) == early
    assert training.checkpoint_for({}) == late


def test_what_was_saved_after_the_checkpoint_is_put_aside(training: example.Training) -> None:
    """A second rollback must not land on weights of the course that was abandoned."""
    early = saved(training, 1000)
    trained(training, 2)
    saved(training, 2000)
    training.roll_back(early, skip_batches=0)
    assert training.checkpoints() == [early]


def test_poisoned_batches_make_the_loss_jump(training: example.Training) -> None:
    """The labels are noise, so a model that has learnt anything is worse than one that has not."""
    calm = trained(training, 30)
    training.batches.poisoned = range(30, 40)
    assert training.train()[0] > calm + 1.0
