from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")
# Minimum seconds between readings.
_SHORTEST = 1.0
# Positions in ``/proc/<pid>/stat`` after the command's name (proc_pid_stat(5)).
_USER, _SYSTEM, _CHILDREN_USER, _CHILDREN_SYSTEM = 11, 12, 13, 14


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
    own = _ticks(proc / "self")
    if own is None:
        return None
    children: set[str] = set()
    for listed in (proc / "self" / "task").glob("*/children"):
        children.update((_read(listed) or "").split())
    return (own + sum(_ticks(proc / child) or 0 for child in children)) / os.sysconf("SC_CLK_TCK")


def _ticks(process: Path) -> int | None:
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
