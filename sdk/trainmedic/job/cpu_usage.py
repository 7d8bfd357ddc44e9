"""CPU cores that a training process and its children keep busy, measured on request.

It reads Linux's ``/proc``. On other systems the value is unknown. Called by ``rank_stats``.
"""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")
_SHORTEST = 1.0
"""Seconds between two readings. An earlier call returns the last value again."""
_USER, _SYSTEM, _CHILDREN_USER, _CHILDREN_SYSTEM = 11, 12, 13, 14
"""Positions in ``/proc/<pid>/stat``, after the name of the program (proc_pid_stat(5))."""


class CpuMeter:
    """Meter of this process. ``now`` is a clock in seconds that is never set."""

    def __init__(self, now: float, proc: Path = PROC) -> None:
        self._proc = proc
        self._at, self._seconds = now, cpu_seconds(proc)
        self._cores: float | None = None

    def cores(self, now: float) -> float | None:
        """Return the mean number of busy cores since the last reading. None before the first reading, and if
        unknown."""
        if now - self._at < _SHORTEST:
            return self._cores
        seconds = cpu_seconds(self._proc)
        before, elapsed = self._seconds, now - self._at
        self._at, self._seconds = now, seconds
        # The CPU time of a child that got another parent is lost.
        is_known = seconds is not None and before is not None and seconds >= before
        self._cores = (seconds - before) / elapsed if is_known else None  # type: ignore[operator]
        return self._cores


def cpu_seconds(proc: Path = PROC) -> float | None:
    """Return the CPU time so far of this process and its children, such as the workers of data loaders.

    The process's own figures include the time of children that have ended.
    """
    own = _ticks(proc / "self")
    if own is None:
        return None
    children: set[str] = set()
    for listed in (proc / "self" / "task").glob("*/children"):
        children.update((_read(listed) or "").split())
    return (own + sum(_ticks(proc / child) or 0 for child in children)) / os.sysconf("SC_CLK_TCK")


def _ticks(process: Path) -> int | None:
    """Return the clock ticks of a process and of its children that have ended."""
    fields = (_read(process / "stat") or "").rpartition(")")[2].split()
    try:
        return sum(int(fields[place]) for place in (_USER, _SYSTEM, _CHILDREN_USER, _CHILDREN_SYSTEM))
    except (IndexError, ValueError):
        return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None
