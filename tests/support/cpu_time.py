"""Processor time of processes and of their threads, for benchmarks whose machine has other things to do."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CpuTime:
    """Seconds of processor time, user and system together."""

    main: float
    """Of the main thread, which runs the event loop."""
    others: float
    """Of all other threads; in a server that is above all the one that writes the run store."""

    @property
    def total(self) -> float:
        return self.main + self.others

    def __sub__(self, other: CpuTime) -> CpuTime:
        return CpuTime(self.main - other.main, self.others - other.others)


def cpu_time(pid: int) -> CpuTime:
    """What the process has used until now, in steps of 10 ms. Raises OSError where there is none."""
    main, total = _seconds(Path(f"/proc/{pid}/task/{pid}/stat")), _seconds(Path(f"/proc/{pid}/stat"))
    return CpuTime(main, total - main)


def _seconds(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
