"""What the agent counts of itself. The exporter shows it; any thread adds to it."""

from __future__ import annotations

import threading
from collections import Counter


class AgentCounters:
    """Counts since the process started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._commands: Counter[tuple[str, str]] = Counter()
        self._faults: Counter[str] = Counter()
        self._heard_at: float | None = None

    def command(self, action: str, status: str) -> None:
        """A command was answered."""
        with self._lock:
            self._commands[action, status] += 1

    def fault(self, loop: str) -> None:
        """A background loop survived an unexpected error."""
        with self._lock:
            self._faults[loop] += 1

    def heard(self, at: float) -> None:
        """Redis took a message, at this Unix time."""
        self._heard_at = at

    def heard_at(self) -> float | None:
        """When Redis last took a message; None before the first."""
        return self._heard_at

    def commands(self) -> dict[tuple[str, str], int]:
        """Answered commands by action and status."""
        with self._lock:
            return dict(self._commands)

    def faults(self) -> dict[str, int]:
        """Survived errors by loop."""
        with self._lock:
            return dict(self._faults)
