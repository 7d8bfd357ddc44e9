"""torchtitan's checkpoints as they lie on the disk, what is left out of its data, and what `protect` refuses."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

import trainmedic.torchtitan
from trainmedic import ConfigurationError, Medic, TrainmedicError
from trainmedic.recovery import skipped_data
from trainmedic.recovery.health import CheckpointHealth
from trainmedic.torchtitan import checkpoints, training
from trainmedic.trainer.carried_files import CarriedFiles

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process saves here

WEIGHTS = {"layer.weight": torch.ones(3)}
FOUND_BY_TORCHTITAN = re.compile(r"step-(\d+)")


def saved(directory: Path, *steps: int, position: bool = True) -> None:
    for step in steps:
        state = {**WEIGHTS, **({"train_state": {"step": step}} if position else {})}
        dcp.save(state, checkpoint_id=directory / f"step-{step}", no_dist=True)


def a_training(directory: Path, **options: Any) -> training.TitanTraining:
    manager = SimpleNamespace(
        enable=True,
        load_only=False,
        folder=str(directory),
        interval=10,
        exclude_from_loading=[],
        load=None,
        save=None,
        _should_save=None,
        maybe_wait_for_saving=None,
        maybe_wait_for_staging=None,
    )
    vars(manager).update(options)
    trainer = SimpleNamespace(
        checkpointer=manager,
        config=SimpleNamespace(dump_folder=str(directory)),
        metrics_processor=SimpleNamespace(log=None),
        should_continue_training=None,
        train_step=None,
        batch_generator=None,
    )
    return training.TitanTraining(Mock(Medic, job="llm-1", rank=0, world_size=1), trainer, None, CarriedFiles(0, None))


def test_a_checkpoint_that_cannot_be_read_once_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a network file system."""
    saved(tmp_path, 20)
    with monkeypatch.context() as during:
        during.setattr(checkpoints.FileSystemReader, "read_metadata", Mock(side_effect=OSError(116, "Stale handle")))
        assert checkpoints.LAYOUT.in_directory(tmp_path)[0].complete is False
    assert "cannot be read now" in caplog.text
    assert checkpoints.LAYOUT.in_directory(tmp_path)[0].complete is True


def test_only_what_torchtitan_can_go_on_from_is_complete(tmp_path: Path) -> None:
    """Not the weights alone, not one of step 0, of which torchtitan loads no more; not one that is half-written, or
    whose metadata are damaged."""
    saved(tmp_path, 0, 10)
    saved(tmp_path, 20, position=False)
    saved(tmp_path, 30, 40)
    (tmp_path / "step-30" / checkpoints.METADATA).unlink()
    (tmp_path / "step-40" / checkpoints.METADATA).write_bytes(b"half")
    (tmp_path / "step-last").mkdir()
    present = [(checkpoint.step, checkpoint.complete) for checkpoint in checkpoints.LAYOUT.in_directory(tmp_path)]
    assert present == [(0, False), (10, True), (20, False), (30, False), (40, False)]
    assert checkpoints.LAYOUT.in_directory(tmp_path / "nowhere") == []


def test_the_mark_says_when_it_was_whole_and_what_it_is_judged_by(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    before = checkpoints.LAYOUT.in_directory(tmp_path)[0]
    checkpoints.LAYOUT.mark(before.path, CheckpointHealth(loss=4.0, loss_median=1.5, reports=30))
    after = checkpoints.LAYOUT.in_directory(tmp_path)[0]
    assert after.at >= before.at
    assert after.health == CheckpointHealth(loss=4.0, loss_median=1.5, reports=30)


def test_what_is_put_aside_is_no_checkpoint_to_torchtitan(tmp_path: Path) -> None:
    """It searches the names for its own anywhere in them, and would go on from it, or count it and delete others."""
    saved(tmp_path, 10, 20, 30)
    a_training(tmp_path).loop.put_aside(10)
    saved(tmp_path, 20)
    a_training(tmp_path).loop.put_aside(10)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["abandoned-1-of-20", "abandoned-1-of-30", "abandoned-2-of-20", "step-10"]
    assert [name for name in names if FOUND_BY_TORCHTITAN.search(name)] == ["step-10"]


def test_a_checkpoint_that_did_not_come_about_is_not_answered_as_written(tmp_path: Path) -> None:
    """Its write in the background can fail. A playbook may go on to drain the node."""
    titan = a_training(tmp_path, maybe_wait_for_saving=lambda: None)
    titan.medic.window = MagicMock()  # type: ignore[method-assign]
    titan._trainer.step = titan._saved = 10
    titan.save_begins(10, CheckpointHealth())
    with pytest.raises(TrainmedicError, match="step-10 is missing or incomplete"):
        titan.checkpoint()
    saved(tmp_path, 10)
    assert titan.checkpoint()["checkpoint"] == "step-10"


def test_batches_that_are_left_out_already_count(tmp_path: Path) -> None:
    """They stay left out in another course, and only what is left out newly is not what came before."""
    first = a_training(tmp_path)
    first._drawn = 4
    first.leave_out(4, 3)
    assert list(first.without_skipped(iter(range(4, 10)))) == [7, 8, 9]
    assert (first.newly_skipped, first._first_skips, first._drawn) == (3, 3, 10)
    again = a_training(tmp_path)
    again.left_out = again._left_out_before = skipped_data.read(tmp_path)
    again._drawn = 4
    again.leave_out(4, 4)
    assert list(again.without_skipped(iter(range(4, 10)))) == [8, 9]
    assert (again.newly_skipped, again._first_skips) == (4, 1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, ""),
        ({"enable": False}, "there are no checkpoints: --checkpoint.enable"),
        ({"load_only": True}, "no checkpoints are written: --checkpoint.load_only"),
        ({"folder": "gs://bucket/run"}, "the checkpoints are not in a file system: gs://bucket/run"),
    ],
)
def test_why_a_training_cannot_go_back_is_said(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    assert a_training(tmp_path, **options).no_restart_because == reason


def test_another_manager_of_checkpoints_is_not_guessed_at() -> None:
    told = training._why_no_restart(SimpleNamespace(enable=True, folder="checkpoints"))
    assert told == "how a SimpleNamespace keeps its checkpoints is not known; use CheckpointManager"


def test_a_class_without_the_methods_that_are_replaced_is_refused() -> None:
    """By the name of the first that it lacks; and one that is protected, since two would not agree."""

    class Trainer:
        def train(self) -> None: ...

    with pytest.raises(ConfigurationError, match=r"Trainer has no train_step\(\): this release of torchtitan is not"):
        trainmedic.torchtitan.protect(cast(Medic, SimpleNamespace(rank=0)), trainer=Trainer)

    class Whole(Trainer):
        train_step = should_continue_training = batch_generator = Trainer.train

    trainmedic.torchtitan.protect(cast(Medic, SimpleNamespace(rank=0)), trainer=Whole)
    with pytest.raises(ConfigurationError, match="Whole is protected already"):
        trainmedic.torchtitan.protect(cast(Medic, SimpleNamespace(rank=0)), trainer=Whole)


def test_that_torchtitan_is_not_installed_is_said() -> None:
    with pytest.raises(ConfigurationError, match=r"there is no torchtitan\.trainer: install torchtitan 0\.3"):
        trainmedic.torchtitan.protect(cast(Medic, SimpleNamespace(rank=0)))


def test_a_checkpoint_that_cannot_be_read_for_a_moment_counts_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that fails; a damaged one stays out."""
    saved(tmp_path, 10)
    read, errors = checkpoints.FileSystemReader.read_metadata, [OSError("stale handle"), ValueError("damaged")]

    def failing(reader: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return read(reader)

    monkeypatch.setattr(checkpoints.FileSystemReader, "read_metadata", failing)
    path = tmp_path / "step-10"
    assert not checkpoints.LAYOUT.is_complete(path)
    errors.clear()
    assert checkpoints.LAYOUT.is_complete(path)
    saved(tmp_path, 20)
    errors.append(ValueError("damaged"))
    assert not checkpoints.LAYOUT.is_complete(tmp_path / "step-20")
    assert not checkpoints.LAYOUT.is_complete(tmp_path / "step-20")
