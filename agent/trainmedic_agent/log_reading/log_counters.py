"""What reading logs counts of itself. Any thread adds to it; ``log_metrics`` shows it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from trainmedic_agent.log_reading.cut_record import CutRecord


class LogCounters:
    """Counts since the process started, and what is so now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.cuts = CutRecord()
        """What budgets of jobs and users have left out."""
        self._lines: Counter[str] = Counter()
        self._lines_left_out: Counter[str] = Counter()
        self._findings: Counter[str] = Counter()
        self.bytes_left_out = 0
        self.truncations = 0
        self.kernel_lines_lost = 0
        self.findings_lost = 0
        """Updates of findings for which there was no room while nobody took them, and those that cannot be read."""
        self.findings_waiting = 0
        self.files: Mapping[str, int] = {}
        """Files that are followed, by source."""
        self.refused: Mapping[str, int] = {}
        """What lies where logs are read and is not, by the reason."""
        self.takes_rights = False
        """Whether files are opened with the rights of users. If not, users are compared with file modes."""
        self.rules = ""
        """The version of the rules in force; empty where there are none."""
        self.problem = ""
        """Why lines are not looked at now; empty where they are."""

    def lines(self, source: str, count: int) -> None:
        """Count lines that were read."""
        with self._lock:
            self._lines[source] += count

    def lines_left_out(self, source: str, count: int) -> None:
        """Count lines that were read and not looked at, because there were too many."""
        with self._lock:
            self._lines_left_out[source] += count

    def finding(self, rule: str) -> None:
        """Count a finding that is new."""
        with self._lock:
            self._findings[rule] += 1

    def add_bytes_left_out(self, count: int) -> None:
        with self._lock:
            self.bytes_left_out += count

    def add_kernel_lines_lost(self, count: int) -> None:
        with self._lock:
            self.kernel_lines_lost += count

    def add_truncation(self) -> None:
        with self._lock:
            self.truncations += 1

    def all_lines(self) -> dict[str, int]:
        with self._lock:
            return dict(self._lines)

    def all_lines_left_out(self) -> dict[str, int]:
        with self._lock:
            return dict(self._lines_left_out)

    def all_findings(self) -> dict[str, int]:
        with self._lock:
            return dict(self._findings)
