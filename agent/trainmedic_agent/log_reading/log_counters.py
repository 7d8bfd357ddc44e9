"""Counters of log reading. Thread-safe."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from trainmedic_agent.log_reading.cut_record import CutRecord


class LogCounters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.cuts = CutRecord()
        self._lines: Counter[str] = Counter()
        self._lines_left_out: Counter[str] = Counter()
        self._findings: Counter[str] = Counter()
        self.bytes_left_out = 0
        self.truncations = 0
        self.kernel_lines_lost = 0
        self.findings_lost = 0  # updates dropped as unreadable, or for lack of space
        self.findings_waiting = 0  # updates that are not in Redis yet
        self.files: Mapping[str, int] = {}  # followed files by source
        self.refused: Mapping[str, int] = {}  # files not read, by `UnreadReason`
        self.takes_rights = False  # True if files are opened with their users' rights, False if file modes are compared
        self.rules = ""  # version of the active rules, empty before the first
        self.problem = ""  # why findings cannot be stored, otherwise empty

    def add_lines(self, source: str, count: int) -> None:
        with self._lock:
            self._lines[source] += count

    def add_lines_left_out(self, source: str, count: int) -> None:
        with self._lock:
            self._lines_left_out[source] += count

    def add_finding(self, rule: str) -> None:
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
