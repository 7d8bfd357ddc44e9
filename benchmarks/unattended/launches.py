"""Times at which the launchers' attempts end and begin, by their output and log directories: launchers print no times,
and killed processes write nothing.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path

from benchmarks.unattended.journal import Journal

NOTICED, ENDED, BEGAN = "noticed", "attempt ended", "attempt began"
"""Events: torchrun or a launcher reports an ended process or a hang; a launcher reports its attempt's end; a launcher
has made an attempt's directory, its first act.
"""
_LOOK_SECONDS = 0.02
_NOTICED = re.compile(rb"Sending process|failed \(exitcode|ending the attempt|attempt \d+ failed")
_ENDED = re.compile(rb"^trainmedic-run: attempt (\d+) failed", re.MULTILINE)


class LaunchWatch(threading.Thread):
    """Watches one launcher, and records events, at most 20 ms late on an idle machine."""

    def __init__(self, journal: Journal, node: str, output: Path, logs: Path) -> None:
        super().__init__(daemon=True)
        self._journal = journal
        self._node = node
        self._output = output
        self._logs = logs
        self._read = 0
        self._begun: set[str] = set()
        self._ends = threading.Event()

    def end(self) -> None:
        self._ends.set()
        self.join()

    def run(self) -> None:
        while not self._ends.wait(_LOOK_SECONDS):
            self.look()

    def look(self) -> None:
        """Record what has happened since the last look."""
        for attempt in self._new_attempts():
            self._journal.tell(BEGAN, node=self._node, attempt=attempt)
        printed = self._printed()
        if _NOTICED.search(printed):
            self._journal.tell(NOTICED, node=self._node)
        for attempt in _ENDED.findall(printed):
            self._journal.tell(ENDED, node=self._node, attempt=int(attempt))

    def _new_attempts(self) -> Sequence[int]:
        found = {path.name for path in self._logs.glob("*/attempt-[0-9]*")} - self._begun
        self._begun |= found
        return sorted(int(name.rpartition("-")[2]) for name in found)

    def _printed(self) -> bytes:
        """Return the whole lines printed since the last call."""
        if not self._output.exists():
            return b""
        with self._output.open("rb") as file:
            file.seek(self._read)
            lines, newline, _ = file.read().rpartition(b"\n")
        self._read += len(lines) + len(newline)
        return lines + newline
