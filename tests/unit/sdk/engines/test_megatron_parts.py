"""Megatron-LM's checkpoints as they lie on the disk, and what `trainmedic.megatron.protect` refuses."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

import trainmedic.megatron
from trainmedic import ConfigurationError, Medic
from trainmedic.megatron import checkpoints, training
from trainmedic.recovery.health import CheckpointHealth


def saved(directory: Path, *iterations: int) -> None:
    for iteration in iterations:
        path = directory / f"iter_{iteration:07d}"
        path.mkdir()
        (path / "common.pt").write_bytes(b"")


def test_a_checkpoint_is_whole_once_the_tracker_has_come_to_it(tmp_path: Path) -> None:
    """Megatron-LM writes the tracker when all ranks have written theirs; other directories are none of its own."""
    saved(tmp_path, 10, 20, 30)
    (tmp_path / "abandoned-1-iter_0000040").mkdir()
    (tmp_path / "iter_last").mkdir()
    checkpoints.write_tracker(tmp_path, 20)
    present = [(checkpoint.step, checkpoint.complete) for checkpoint in checkpoints.LAYOUT.in_directory(tmp_path)]
    assert present == [(10, True), (20, True), (30, False)]
    assert not checkpoints.LAYOUT.is_complete(tmp_path / "iter_0000030")
    assert checkpoints.LAYOUT.in_directory(tmp_path / "nowhere") == []


@pytest.mark.parametrize("content", [None, "", "release"])
def test_without_a_number_in_the_tracker_nothing_is_whole(tmp_path: Path, content: str | None) -> None:
    """None was written yet, or there are only weights to begin with."""
    saved(tmp_path, 10)
    if content is not None:
        (tmp_path / checkpoints.TRACKER).write_text(content)
    assert not checkpoints.LAYOUT.in_directory(tmp_path)[0].complete


def test_the_mark_says_when_it_was_whole_and_what_it_is_judged_by(tmp_path: Path) -> None:
    """Without being loaded."""
    saved(tmp_path, 10)
    checkpoints.write_tracker(tmp_path, 10)
    before = checkpoints.LAYOUT.in_directory(tmp_path)[0]
    checkpoints.LAYOUT.mark(before.path, CheckpointHealth(loss=4.0, loss_median=1.5, reports=30))
    after = checkpoints.LAYOUT.in_directory(tmp_path)[0]
    assert after.at >= before.at
    assert after.health == CheckpointHealth(loss=4.0, loss_median=1.5, reports=30)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, ""),
        ({"save": None}, "there are no checkpoints: --save"),
        ({"no_save_rng": True}, "with --no-save-rng the training cannot be restored to an earlier state"),
        ({"dataloader_type": "external"}, "with --dataloader-type external the"),
        ({"cuda_graph_impl": "none"}, ""),
        ({"cuda_graph_impl": "local"}, "with --cuda-graph-impl the"),
    ],
)
def test_options_with_which_a_training_cannot_go_back_are_named(options: dict[str, Any], reason: str) -> None:
    """Options that a release does not have are not asked for."""
    told = training._why_no_restart(Namespace(**{"save": "checkpoints", **options}))
    assert told.startswith(reason)
    assert bool(told) == bool(reason)


def test_a_module_without_the_functions_that_are_replaced_is_refused() -> None:
    """By the name of the first that it lacks."""
    with pytest.raises(ConfigurationError, match="training has no train: this release of Megatron-LM is not supported"):
        trainmedic.megatron.protect(cast(Medic, None), module=ModuleType("training"))
