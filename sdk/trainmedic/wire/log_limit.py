"""A bound on lines in the log that somebody else can bring about: by writing nonsense to Redis, for instance."""

from __future__ import annotations

import threading
import time
from typing import Callable


class LogLimit:
    """Lets so many lines through in each span of time. May be used by several threads."""

    def __init__(self, lines: int = 20, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._lines = lines
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._began = clock()
        self._count = 0

    def lets_through(self) -> bool:
        """Whether a line may be written now."""
        with self._lock:
            now = self._clock()
            if now - self._began >= self._seconds:
                self._began, self._count = now, 0
            self._count += 1
            return self._count <= self._lines

    @property
    def is_last(self) -> bool:
        """Whether the line that was let through is the last one for now, and should say so."""
        return self._count == self._lines
