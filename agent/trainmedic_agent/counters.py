"""The agent's own counters, for the exporter."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Counts(Generic[Key]):
    """Numbers by key. Thread-safe."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        """`keys` begin at 0, so that Prometheus sees the first increase."""
        self._lock = threading.Lock()
        self._counts: Counter[Key] = Counter(dict.fromkeys(keys, 0))

    def add(self, key: Key, count: int = 1) -> None:
        with self._lock:
            self._counts[key] += count

    def all(self) -> dict[Key, int]:
        with self._lock:
            return dict(self._counts)


class AgentCounters:
    def __init__(self) -> None:
        self.commands: Counts[tuple[str, str]] = Counts()  # by action and status
        self.loop_errors: Counts[str] = Counts()
        self.scrapes = Counts(["late"])  # late: answered without GPUs, see `AgentCollector`
        self.redis_answered_at: float | None = None  # Unix time of Redis's last answer
