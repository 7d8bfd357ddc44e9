"""How many processor cores a training process and its children keep busy, measured on request.

From Linux's ``/proc``; elsewhere it is not known. Who calls it: ``rank_stats``.
"""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")
_SHORTEST = 1.0
"""Seconds between two readings; sooner, the last figure is given again."""
_USER, _SYSTEM, _CHILDREN_USER, _CHILDREN_SYSTEM = 11, 12, 13, 14
"""Places in ``/proc/<pid>/stat``, behind the name of the program (proc_pid_stat(5))."""


class CpuMeter:
    """Measures this process. ``now`` is a clock that is never set, in seconds."""

    def __init__(self, now: float, proc: Path = PROC) -> None:
        self._proc = proc
        self._at, self._seconds = now, cpu_seconds(proc)
        self._cores: float | None = None

    def cores(self, now: float) -> float | None:
        """Return the mean number of busy cores since the last reading; None before the first, and where unknown."""
        if now - self._at < _SHORTEST:
            return self._cores
        seconds = cpu_seconds(self._proc)
        before, elapsed = self._seconds, now - self._at
        self._at, self._seconds = now, seconds
        # A child that was handed to another process takes its time with it.
        is_known = seconds is not None and before is not None and seconds >= before
        self._cores = (seconds - before) / elapsed if is_known else None  # type: ignore[operator]
        return self._cores


def cpu_seconds(proc: Path = PROC) -> float | None:
    """Processor time of this process and its children, such as the workers of data loaders, so far.

    The time of children that have ended is in the process's own figures.
    """
    own = _ticks(proc / "self")
    if own is None:
        return None
    children: set[str] = set()
    for listed in (proc / "self" / "task").glob("*/children"):
        children.update((_read(listed) or "").split())
    return (own + sum(_ticks(proc / child) or 0 for child in children)) / os.sysconf("SC_CLK_TCK")


def _ticks(process: Path) -> int | None:
    """Clock ticks of a process and of its children that have ended."""
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
