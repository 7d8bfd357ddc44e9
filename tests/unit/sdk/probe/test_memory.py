"""The test of memory, on a processor's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainmedic.probe import memory

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CPU_BYTES", 1_000_002)
    monkeypatch.setattr(memory, "_CPU_BLOCK", 300_000)


def test_what_is_read_back_as_written_is_right() -> None:
    """All of it is tested, but the part of a number."""
    result = memory.check_memory(CPU, 80)
    assert (result.bytes, result.is_right) == (1_000_000, True)
    assert result.bytes_per_s > 0


@pytest.mark.parametrize(
    "write",
    [
        lambda block: block[7].bitwise_or_(1),  # a bit that is always 1
        lambda block: block[7].bitwise_and_(~4),  # a bit that is always 0
        lambda block: block.__setitem__(-1, block[0]),  # two addresses of one cell
    ],
)
def test_bad_memory_is_found(monkeypatch: pytest.MonkeyPatch, write: Callable[[torch.Tensor], object]) -> None:
    """Whichever pattern shows it. Each block is damaged after it was written."""
    fill, copy = torch.Tensor.fill_, torch.Tensor.copy_

    def filled(block: torch.Tensor, value: int) -> torch.Tensor:
        result = fill(block, value)
        write(block)
        return result

    def copied(block: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        result = copy(block, source)
        write(block)
        return result

    monkeypatch.setattr(torch.Tensor, "fill_", filled)
    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    assert not memory.check_memory(CPU, 80).is_right


def test_two_blocks_of_the_same_cells_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    copy, written = torch.Tensor.copy_, list[torch.Tensor]()

    def copied(block: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        written.append(block)
        return copy(written[0][: len(block)], copy(block, source))

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    assert not memory.check_memory(CPU, 80).is_right


class Made(TorchDispatchMode):
    """Counts the numbers of tensors that are made in memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, call: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = call(*arguments, **(options or {}))
        given = [each for each in (*arguments, *(options or {}).values()) if isinstance(each, torch.Tensor)]
        storages = {each.untyped_storage().data_ptr() for each in given}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in storages:
            self.count += result.numel()
        return result


def test_nothing_is_allocated_once_the_memory_is_taken() -> None:
    """On a GPU that is full by then it could fail. Each comparison makes a single number."""
    with Made() as made:
        memory.check_memory(CPU, 80)
    assert made.count < 250_000 + 2 * 75_000 + 100
