"""Test of a rank's memory: patterns are written and read back. The driver reports bad memory only when it is used."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Iterator

import torch

CPU_BYTES = 256_000_000
_BLOCK, _CPU_BLOCK = 1 << 30, 1 << 26  # bytes allocated at once
# The first one is a warm-up, and not timed. After them each number is its own position.
_PATTERNS = (0, 0x55555555, -0x55555556)


@dataclass(frozen=True)
class MemoryTest:
    bytes: int
    bytes_per_s: float  # Written and compared, by the second
    is_right: bool


def check_memory(device: torch.device, percent: float) -> MemoryTest:
    """Test this share of the GPU's free memory, or `CPU_BYTES` of main memory."""
    blocks = _allocate(device, percent)
    size = sum(block.numel() * 4 for block in blocks)
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    began = 0.0
    for turn, pattern in enumerate((*_PATTERNS, None)):
        if turn == 1:
            _synchronize(device)
            began = time.perf_counter()
        for block in blocks:
            if pattern is None:
                block.copy_(_positions(block))
            else:
                block.fill_(pattern)
        for block in blocks:
            wrong += (block != (_positions(block) if pattern is None else pattern)).any()
    _synchronize(device)
    seconds = time.perf_counter() - began
    timed = len(_PATTERNS)  # without the warm-up, with the positions
    result = MemoryTest(size, size * timed / seconds, int(wrong.item()) == 0)
    del blocks
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def _allocate(device: torch.device, percent: float) -> list[torch.Tensor]:
    # Other processes may take some of the memory during this time, so less is enough.
    is_gpu = device.type == "cuda"
    left = int(torch.cuda.mem_get_info(device)[0] * percent / 100) if is_gpu else CPU_BYTES
    blocks: list[torch.Tensor] = []
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        for size in _sizes(left, _BLOCK if is_gpu else _CPU_BLOCK):
            blocks.append(torch.empty(size // 4, dtype=torch.int32, device=device))  # noqa: PERF401 - it may fail
    return blocks


def _sizes(left: int, most: int) -> Iterator[int]:
    while left >= 4:
        yield min(left, most)
        left -= most


def _positions(block: torch.Tensor) -> torch.Tensor:
    return torch.arange(block.numel(), dtype=torch.int32, device=block.device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
