"""The state of a training as bytes: what is read is what was copied."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from trainmedic.torch.memory import snapshots
from trainmedic.torch.memory.snapshots import SnapshotTaker


def copied(state: Any, taker: SnapshotTaker | None = None) -> tuple[bytearray, snapshots.Snapshot]:
    snapshot = (taker or SnapshotTaker()).take(state)
    memory = bytearray(snapshot.size)
    snapshot.copy(memory, snapshots.views_of(memory, snapshot.places))  # type: ignore[arg-type]
    return memory, snapshot


def read(memory: bytearray, snapshot: snapshots.Snapshot, **options: Any) -> Any:
    return snapshots.read(memory, snapshot.structure_offset, snapshot.size, **options)


def same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, torch.Tensor):
        return mine.dtype == theirs.dtype and mine.shape == theirs.shape and torch.equal(mine, theirs)
    if isinstance(mine, dict):
        return list(mine) == list(theirs) and all(same(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(theirs) and all(same(*pair) for pair in zip(mine, theirs, strict=True))
    return bool(mine == theirs)


def test_every_kind_of_tensor_and_value_comes_back() -> None:
    """Numbers of all types, scalars, empty ones, expanded and transposed ones; and what is no tensor."""
    state = {
        "types": [torch.arange(5).to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.bool)],
        "complex": torch.randn(3, dtype=torch.complex64),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4, dtype=torch.int32),
        "expanded": torch.randn(2, 1).expand(2, 5),
        "part": torch.randn(6, 6)[1:5, ::2],
        "sparse": torch.eye(3).to_sparse(),
        "parameter": torch.nn.Parameter(torch.randn(3)).data,
        "others": OrderedDict(a=(1, 2.5, None, "text", {3}), b=range(4)),
    }
    memory, snapshot = copied(state)
    held = read(memory, snapshot)
    assert same({**state, "sparse": 0}, {**held, "sparse": 0})
    assert torch.equal(held["sparse"].to_dense(), torch.eye(3))


def test_tensors_keep_their_format_in_memory() -> None:
    """Such as channels last, whose sums differ in the last bit from those of another order."""
    state = [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(3, 4).t()]
    held = read(*copied(state))
    assert [tensor.stride() for tensor in held] == [tensor.stride() for tensor in state]
    assert same(held, state)


def test_what_is_read_is_independent_of_the_bytes_unless_asked_for() -> None:
    """Training changes it, and the checkpoint stays as it was; the disk is written from the bytes themselves."""
    memory, snapshot = copied({"weight": torch.ones(4)})
    held = read(memory, snapshot)
    held["weight"].fill_(7)
    assert read(memory, snapshot)["weight"].tolist() == [1.0] * 4
    views = read(memory, snapshot, copies=False)
    views["weight"].fill_(7)
    assert read(memory, snapshot)["weight"].tolist() == [7.0] * 4


def test_a_tensor_of_several_names_is_kept_once() -> None:
    """As tied weights are, and stays one tensor."""
    weight = torch.randn(1000)
    memory, snapshot = copied({"embedding": weight, "head": weight.detach()})
    assert len(snapshot.tensors) == 1
    held = read(memory, snapshot)
    assert held["embedding"].data_ptr() == held["head"].data_ptr()


def test_a_state_may_change_its_shape_from_one_copy_to_the_next() -> None:
    """Moments that come with the first step, a parameter that the user adds or removes."""
    taker = SnapshotTaker()
    for sizes in ([3], [3, 100, 7], [3, 100], [5, 1], [5, 1]):
        state = [torch.randn(size) for size in sizes]
        assert same(read(*copied(state, taker)), state)


def test_bytes_that_are_not_a_snapshot_are_told() -> None:
    memory, snapshot = copied({"weight": torch.ones(4)})
    for damage in (snapshot.structure_offset, snapshot.structure_offset + 3, snapshot.size - 2):
        damaged = bytearray(memory)
        damaged[damage] ^= 0xFF
        try:
            read(damaged, snapshot)
        except snapshots.UNREADABLE:
            continue
    with pytest.raises(snapshots.UNREADABLE):
        snapshots.read(bytearray(b"nothing of the kind"), 0, 19)
