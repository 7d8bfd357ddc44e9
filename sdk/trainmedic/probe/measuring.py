"""Barriers and all-reduces within a group, whose ranks all call `measure`.

A duration is that of the slowest rank.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any, Callable

import torch
import torch.distributed as dist

MEGABYTE = 1_000_000
# The first calls connect and allocate.
_WARM_UP = 2
_REPEATS = 5  # measured all-reduces


@dataclass(frozen=True)
class BarrierTimes:
    """Seconds, over `count` measurements."""

    count: int
    mean: float
    median: float
    max: float


@dataclass(frozen=True)
class ReduceTime:
    """Median of several float32 all-reduces."""

    bytes: int
    """Per rank."""
    seconds: float
    bytes_per_s: float  # nccl-tests' algorithm bandwidth, ``bytes ÷ seconds``
    bus_bytes_per_s: float
    """nccl-tests' bus bandwidth, 2 (n - 1) ÷ n times as much: each link's load in a ring."""
    is_right: bool


@dataclass(frozen=True)
class Measurement:
    ranks: int
    barrier: BarrierTimes
    all_reduce: tuple[ReduceTime, ...]

    @property
    def is_right(self) -> bool:
        return all(each.is_right for each in self.all_reduce)


@dataclass(frozen=True)
class ProbeSizes:
    barriers: int = 10
    megabytes: tuple[float, ...] = (1, 10, 100)


def measure(group: Any, control: Any, device: torch.device, sizes: ProbeSizes) -> Measurement:
    """Measure `group`; its CPU group `control` gives all ranks the same result."""
    ranks = dist.get_world_size(group)

    def barrier() -> None:
        dist.barrier(group=group, device_ids=[device.index] if device.type == "cuda" else None)

    seconds = [_slowest(time_one, control) for time_one in _time(barrier, device, sizes.barriers)]
    barriers = BarrierTimes(len(seconds), statistics.fmean(seconds), statistics.median(seconds), max(seconds))
    reduces = tuple(
        _measure_all_reduce(round(size * MEGABYTE), group, control, device, ranks) for size in sizes.megabytes
    )
    return Measurement(ranks, barriers, reduces)


def _measure_all_reduce(size: int, group: Any, control: Any, device: torch.device, ranks: int) -> ReduceTime:
    numbers = torch.empty(max(size // 4, 1), dtype=torch.float32, device=device)
    mine = float(dist.get_rank(group) + 1)
    expected = ranks * (ranks + 1) / 2
    wrong = 0
    times = []
    for turn in range(_WARM_UP + _REPEATS):
        numbers.fill_(mine)
        synchronize(device)
        dist.barrier(group=control)  # a common start: waiting for others is not slowness
        (seconds,) = _time(lambda: dist.all_reduce(numbers, group=group), device, 1, warm_up=0)
        # Integers below 2**24 are exact in float32 in any order of addition.
        wrong += int((numbers != expected).any())
        if turn >= _WARM_UP:
            times.append(_slowest(seconds, control))
    median = statistics.median(times)
    size = numbers.numel() * 4
    return ReduceTime(size, median, size / median, size / median * 2 * (ranks - 1) / ranks, _none_wrong(wrong, control))


def _time(work: Callable[[], Any], device: torch.device, count: int, warm_up: int = _WARM_UP) -> list[float]:
    seconds = []
    for turn in range(warm_up + count):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        if turn >= warm_up:
            seconds.append(time.perf_counter() - began)
    return seconds


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(seconds: float, control: Any) -> float:
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=control)
    return float(value.item())


def _none_wrong(wrong: int, control: Any) -> bool:
    count = torch.tensor([wrong])
    dist.all_reduce(count, group=control)
    return int(count.item()) == 0
