"""Rate limit for log lines that other programs can provoke."""

from __future__ import annotations

import threading
import time
from typing import Callable


class LogLimit:
    """Thread-safe."""

    def __init__(self, lines: int = 20, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._lines = lines
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._began = clock()
        self._count = 0

    def lets_through(self) -> bool:
        with self._lock:
            now = self._clock()
            if now - self._began >= self._seconds:
                self._began, self._count = now, 0
            self._count += 1
            return self._count <= self._lines

    @property
    def is_last(self) -> bool:
        """True after the last line that this period lets through."""
        return self._count == self._lines
