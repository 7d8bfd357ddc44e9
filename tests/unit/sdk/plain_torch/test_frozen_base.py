"""The frozen base of a model in the checkpoints of a directory: written once, and as exact as all else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainmedic.torch.checkpoints.checkpoint_files import TRAINING
from trainmedic.torch.checkpoints.checkpoint_storage import CheckpointDirectory, UnusableCheckpoint
from trainmedic.torch.checkpoints.digests import digests_of
from trainmedic.torch.checkpoints.state_digests import tensors_of_parts
from trainmedic.torch.state_parts import StateParts


def made(seed: int = 1) -> tuple[Any, StateParts]:
    """A base of 2 MiB, frozen, and a small head that is trained."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 1))
    model[0].requires_grad_(False)
    return model, StateParts(model=model, optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1))


def save(storage: CheckpointDirectory, parts: StateParts, step: int, has_digests: bool = True) -> Any:
    return storage.save(step, parts, {"digests": digests_of(tensors_of_parts(parts)) if has_digests else None})


def file_in(checkpoint: Any) -> Path:
    (file,) = checkpoint.path.glob("frozen-*.pt")
    return Path(file)


@pytest.mark.parametrize("has_digests", [True, False])
def test_the_base_is_written_once_and_comes_back_exactly(has_digests: bool, tmp_path: Path) -> None:
    """Each checkpoint is whole without the others, and a new process links to what is there."""
    model, parts = made()
    storage = CheckpointDirectory(tmp_path)
    first = save(storage, parts, 10, has_digests)
    with torch.no_grad():
        model[1].weight.add_(1.0)
    second = save(storage, parts, 20, has_digests)
    third = save(CheckpointDirectory(tmp_path), parts, 30, has_digests)
    assert len({file_in(each).stat().st_ino for each in (first, second, third)}) == 1
    assert (second.path / TRAINING).stat().st_size < 200_000
    shutil.rmtree(first.path)
    shutil.rmtree(third.path)
    then = digests_of(tensors_of_parts(parts))
    other, others = made(seed=2)
    storage.load(second, others)
    assert digests_of(tensors_of_parts(others)) == then
    assert torch.equal(other[0].weight, model[0].weight)
    assert storage.checkpoints()[0].complete


@pytest.mark.parametrize("has_digests", [True, False])
def test_a_tied_parameter_is_written_once_under_both_names(has_digests: bool, tmp_path: Path) -> None:
    """Language models tie the embedding and the head, which may be most of a small one."""
    model, _ = made()
    model.add_module("head", nn.Linear(512, 1024))
    model.head.weight = model[0].weight
    model.head.bias.requires_grad_(False)
    parts = StateParts(model=model, optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1))
    checkpoint = save(CheckpointDirectory(tmp_path), parts, 10, has_digests)
    assert (checkpoint.path / TRAINING).stat().st_size < 200_000
    assert file_in(checkpoint).stat().st_size < 1.1 * model[0].weight.nbytes
    then = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model[0].weight.zero_()
    CheckpointDirectory(tmp_path).load(checkpoint, parts)
    assert all(torch.equal(value, then[name]) for name, value in model.state_dict().items())


def test_a_base_that_cannot_be_read_is_replaced_by_the_same_one_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The present parameters serve if they have the digest that was kept; else the checkpoint cannot be used."""
    model, parts = made()
    storage = CheckpointDirectory(tmp_path)
    checkpoint = save(storage, parts, 10)
    damaged = bytearray(file_in(checkpoint).read_bytes())
    damaged[5000] ^= 1
    file_in(checkpoint).write_bytes(damaged)
    then = digests_of(tensors_of_parts(parts))
    with torch.no_grad():
        model[1].weight.add_(1.0)
    storage.load(checkpoint, parts)
    assert digests_of(tensors_of_parts(parts)) == then
    assert "using the identical present parameters" in caplog.text
    with torch.no_grad():
        model[0].weight[3, 4] += 1.0
    with pytest.raises(UnusableCheckpoint, match=r"frozen-.* cannot be read"):
        storage.load(checkpoint, parts)


@pytest.mark.parametrize("harm", [lambda held: held.to("meta"), lambda held: held.to_sparse()])
def test_a_present_base_without_readable_values_replaces_none(
    tmp_path: Path, harm: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """The checkpoint is unusable then, so that an older one is tried."""
    model, parts = made()
    checkpoint = save(CheckpointDirectory(tmp_path), parts, 10)
    file_in(checkpoint).write_bytes(b"damaged")
    model[0].weight = torch.nn.Parameter(harm(model[0].weight.detach()), requires_grad=False)
    with pytest.raises(UnusableCheckpoint, match=r"frozen-.* cannot be read"):
        CheckpointDirectory(tmp_path).load(checkpoint, parts)


def test_a_base_that_changes_is_frozen_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once; each checkpoint has the base as it was then."""
    model, parts = made()
    storage = CheckpointDirectory(tmp_path, keep=None)
    saved = []
    for step in (10, 20, 30):
        saved.append((save(storage, parts, step), digests_of(tensors_of_parts(parts))))
        with torch.no_grad():
            model[0].weight[3, 4] += 1.0
    assert [len(list(checkpoint.path.glob("frozen-*.pt"))) for checkpoint, _ in saved] == [1, 0, 0]
    assert caplog.text.count("parameters that require no gradient have changed") == 1
    for checkpoint, then in saved:
        _, others = made(seed=2)
        storage.load(checkpoint, others)
        assert digests_of(tensors_of_parts(others)) == then


def test_what_is_trained_or_small_is_in_one_file(tmp_path: Path) -> None:
    """No file of its own for a few numbers, nor for the average of a model."""
    small = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
    average = nn.Linear(1024, 1024).requires_grad_(False)
    parts = StateParts(model=small, optimizer=torch.optim.SGD(small[1].parameters(), lr=0.1), ema=average)
    checkpoint = save(CheckpointDirectory(tmp_path), parts, 10)
    assert not list(checkpoint.path.glob("frozen-*.pt"))
