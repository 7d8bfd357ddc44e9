"""Memory and CPU time of this process, its children, CUDA and the host."""

from __future__ import annotations

import os
import statistics
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")

# Minimum seconds between readings of the CPU time.
_SHORTEST = 1.0
# Positions in ``/proc/<pid>/stat`` after the command's name (proc_pid_stat(5)).
_USER, _SYSTEM, _CHILDREN_USER, _CHILDREN_SYSTEM = 11, 12, 13, 14

_SAMPLES = 60
_FEWEST_SAMPLES = 20
_SAMPLE_INTERVAL_S = 4.0  # 60 samples cover 4 min


@dataclass(frozen=True)
class Cuda:
    """Bytes of the device that this process uses most."""

    allocated: int
    reserved: int
    total: int
    retries: int  # allocations that succeeded only after the cache was emptied


def resident_bytes(proc: Path = PROC) -> int | None:
    """Return the bytes of this process and its children; shared pages count in each."""
    pages = _of_process_and_children(proc, _resident_pages)
    return None if pages is None else pages * os.sysconf("SC_PAGE_SIZE")


def host_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> tuple[int, int] | None:
    """Return used bytes and their limit: the lowest of the machine's, the control group's and its parents'.

    Reclaimable memory does not count as used. None if unreadable.
    """
    machine = _fields(proc / "meminfo", ":")
    total, available = machine.get("MemTotal"), machine.get("MemAvailable")
    least = None if total is None or available is None else ((total - available) * 1024, total * 1024)
    for group in _control_groups(proc, cgroup):  # Slurm limits a job and its steps, not the group of a task
        limit, current = _read(group / "memory.max"), _read(group / "memory.current")
        if limit and current and limit.strip().isdigit() and (least is None or int(limit) < least[1]):
            reclaimable = _fields(group / "memory.stat", " ").get("inactive_file", 0)
            least = max(int(current) - reclaimable, 0), int(limit)
    return least


def cuda_memory() -> Cuda | None:  # None if this process uses none
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    try:
        if cuda is None or not cuda.is_initialized():
            return None
        devices = [_device(cuda, index) for index in range(cuda.device_count())]
    except (RuntimeError, AttributeError, AssertionError):  # lost driver, or a build without CUDA
        return None
    used = [device for device in devices if device.reserved]
    return max(used, key=lambda device: device.reserved) if used else None


def _device(cuda: Any, index: int) -> Cuda:
    figures = cuda.memory_stats(index)
    return Cuda(
        allocated=int(figures.get("allocated_bytes.all.current", 0)),
        reserved=int(figures.get("reserved_bytes.all.current", 0)),
        total=int(cuda.get_device_properties(index).total_memory),
        retries=int(figures.get("num_alloc_retries", 0)),
    )


class Growth:
    """Lasting memory growth per step.

    The slope is the median over all pairs of samples (Theil 1950, Sen 1968); the smaller of two halves counts.
    """

    def __init__(self, samples: int = _SAMPLES, apart: float = _SAMPLE_INTERVAL_S) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=samples)
        self._apart = apart
        self._taken = float("-inf")

    def add_sample(self, steps: int, size: float, now: float) -> None:
        if now - self._taken < self._apart or (self._samples and steps <= self._samples[-1][0]):
            return
        self._taken = now
        self._samples.append((steps, size))

    def per_step(self) -> float | None:
        """Return bytes per step, 0 or more; None for too few samples."""
        samples = list(self._samples)
        if len(samples) < _FEWEST_SAMPLES:
            return None
        middle = len(samples) // 2
        return max(min(_slope(samples[:middle]), _slope(samples[middle:])), 0.0)


def _slope(samples: list[tuple[int, float]]) -> float:
    return statistics.median(
        (late - early) / (then - since)
        for index, (since, early) in enumerate(samples)
        for then, late in samples[index + 1 :]
    )


class CpuMeter:
    def __init__(self, now: float, proc: Path = PROC) -> None:
        self._proc = proc
        self._at, self._seconds = now, cpu_seconds(proc)
        self._cores: float | None = None

    def cores(self, now: float) -> float | None:
        """Return the mean busy cores between the last two readings (one a second at most); None if unknown."""
        if now - self._at < _SHORTEST:
            return self._cores
        seconds = cpu_seconds(self._proc)
        before, elapsed = self._seconds, now - self._at
        self._at, self._seconds = now, seconds
        # CPU time of reparented children is lost.
        is_known = seconds is not None and before is not None and seconds >= before
        self._cores = (seconds - before) / elapsed if is_known else None  # type: ignore[operator]
        return self._cores


def cpu_seconds(proc: Path = PROC) -> float | None:
    # Of this process and its children, ended ones included. None if unreadable.
    ticks = _of_process_and_children(proc, _ticks)
    return None if ticks is None else ticks / os.sysconf("SC_CLK_TCK")


def _of_process_and_children(proc: Path, read: Callable[[Path], int | None]) -> int | None:
    own = read(proc / "self")
    if own is None:
        return None
    listed = (proc / "self" / "task").glob("*/children")
    children = {child for each in listed for child in (_read(each) or "").split()}
    return own + sum(read(proc / child) or 0 for child in children)


def _ticks(process: Path) -> int | None:
    fields = (_read(process / "stat") or "").rpartition(")")[2].split()
    try:
        return sum(int(fields[place]) for place in (_USER, _SYSTEM, _CHILDREN_USER, _CHILDREN_SYSTEM))
    except (IndexError, ValueError):
        return None


def _control_groups(proc: Path, cgroup: Path) -> list[Path]:
    # This process's own first.
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        if line.startswith("0::"):
            inside = cgroup / line[3:].strip().lstrip("/")
            # In a container, the root is often its own group, and the path is the machine's.
            if not (inside / "memory.max").exists():
                return [cgroup]
            return [group for group in (inside, *inside.parents) if group.is_relative_to(cgroup)]
    return []


def _resident_pages(process: Path) -> int | None:
    fields = (_read(process / "statm") or "").split()
    return int(fields[1]) if len(fields) > 1 else None


def _fields(path: Path, separator: str) -> dict[str, int]:
    fields: dict[str, int] = {}
    for line in (_read(path) or "").splitlines():
        name, _, value = line.partition(separator)
        figure = value.split()
        if figure and figure[0].isdigit():
            fields[name] = int(figure[0])
    return fields


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None
