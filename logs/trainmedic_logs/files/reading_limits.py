# Limits for reading a folder (`trainmedic diagnose --dir`). After one is reached, every check fails.
from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

DEFAULT_SECONDS = 600.0
DEFAULT_MEMORY = 1024**3  # bytes
LEAST_MEMORY = 192 * 1024**2
"""Bytes, at least; the program takes about half."""


class LimitKind(StrEnum):
    SECONDS = "seconds"
    MEMORY = "memory"


class LimitReached(OSError):
    """A limit was reached; `strerror` names it."""


class ReadingLimits:
    """`memory`: bytes beyond the present resident memory."""

    def __init__(
        self,
        seconds: float = DEFAULT_SECONDS,
        memory: int = DEFAULT_MEMORY,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        resident: Callable[[], int] | None = None,
    ) -> None:
        self.seconds = seconds
        self.memory = memory
        self.reached: LimitKind | None = None
        self._monotonic = monotonic
        self._resident = resident or resident_bytes
        self._ends_at = monotonic() + seconds
        self._resident_before = self._resident()

    @property
    def seconds_left(self) -> float:
        """0 once a limit is reached."""
        return 0.0 if self.reached else max(self._ends_at - self._monotonic(), 0.0)

    def check(self) -> None:
        """Raises LimitReached."""
        if self.reached is None and self._monotonic() >= self._ends_at:
            self.reached = LimitKind.SECONDS
        if self.reached is None and self._resident() - self._resident_before >= self.memory:
            self.reached = LimitKind.MEMORY
        if self.reached is not None:
            raise LimitReached(0, f"not read to its end: {self.text_of(self.reached)}")

    def text_of(self, kind: LimitKind) -> str:
        if kind is LimitKind.SECONDS:
            return f"the limit of {self.seconds:,.0f} s was reached"
        return f"the limit of {self.memory / 2**20:,.0f} MiB of memory was reached"


def resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")
