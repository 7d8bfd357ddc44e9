"""The agent's own counters, for the exporter. Thread-safe."""

from __future__ import annotations

import threading
from collections import Counter


class AgentCounters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._commands: Counter[tuple[str, str]] = Counter()
        self._loop_errors: Counter[str] = Counter()
        self._late_scrapes = 0
        self._redis_answered_at: float | None = None

    def command(self, action: str, status: str) -> None:
        with self._lock:
            self._commands[action, status] += 1

    def loop_error(self, loop: str) -> None:
        with self._lock:
            self._loop_errors[loop] += 1

    def late_scrape(self) -> None:
        with self._lock:
            self._late_scrapes += 1

    def late_scrapes(self) -> int:  # scrapes answered without GPUs, see `AgentCollector`
        return self._late_scrapes

    def redis_answered(self, at: float) -> None:
        self._redis_answered_at = at

    def redis_answered_at(self) -> float | None:
        """Return the Unix time of Redis's last answer; None before the first."""
        return self._redis_answered_at

    def commands(self) -> dict[tuple[str, str], int]:
        with self._lock:
            return dict(self._commands)

    def loop_errors(self) -> dict[str, int]:
        with self._lock:
            return dict(self._loop_errors)
