"""Test of a rank's memory: patterns are written and read back. The driver reports bad memory only when it is used."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Iterator

import torch

from trainmedic.probe.measuring import synchronize

CPU_BYTES = 256_000_000
_BLOCK, _CPU_BLOCK = 1 << 28, 1 << 26  # bytes allocated at once
# The first one is a warm-up, and not timed. After them each number is its own position, which repeats after 16 GiB.
_PATTERNS = (0, 0x55555555, -0x55555556)


@dataclass(frozen=True)
class MemoryTest:
    bytes: int
    bytes_per_s: float  # written and compared in a second
    is_right: bool


def check_memory(device: torch.device, percent: float) -> MemoryTest:
    """Test this share of the GPU's free memory, or `CPU_BYTES` of main memory."""
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    numbers, differences, *blocks = _allocate(device, percent)
    size = sum(block.numel() * 4 for block in blocks)
    began = 0.0
    for turn, pattern in enumerate((*_PATTERNS, None)):
        if turn == 1:
            synchronize(device)
            began = time.perf_counter()
        for index, block in enumerate(blocks):
            if pattern is None:
                block.copy_(_positions(index, block, numbers))
            else:
                block.fill_(pattern)
        for index, block in enumerate(blocks):
            expected = _positions(index, block, numbers) if pattern is None else pattern
            wrong += torch.ne(block, expected, out=differences[: block.numel()]).any()
    synchronize(device)
    seconds = time.perf_counter() - began
    timed = len(_PATTERNS)  # without the warm-up, with the positions
    result = MemoryTest(size, size * timed / seconds, int(wrong.item()) == 0)
    del blocks, numbers, differences
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def _allocate(device: torch.device, percent: float) -> list[torch.Tensor]:
    # First a block of numbers and one of differences, as temporaries could find no memory.
    is_gpu = device.type == "cuda"
    left, most = CPU_BYTES, _CPU_BLOCK
    if is_gpu:
        left = int(torch.cuda.mem_get_info(device)[0] * percent / 100)
        most = min(_BLOCK, left // 3)
        left -= most + most // 4
    blocks = [torch.empty(most // 4, dtype=kind, device=device) for kind in (torch.int32, torch.bool)]
    # Other processes may take some of the memory during this time, so less is enough.
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        for size in _sizes(left, most):
            blocks.append(torch.empty(size // 4, dtype=torch.int32, device=device))  # noqa: PERF401 - it may fail
    return blocks


def _sizes(left: int, most: int) -> Iterator[int]:
    while left >= 4:
        yield min(left, most)
        left -= most


def _positions(index: int, block: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    begin = (index * numbers.numel() + 2**31) % 2**32 - 2**31
    return torch.arange(begin, begin + block.numel(), out=numbers[: block.numel()])
