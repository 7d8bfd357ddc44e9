from __future__ import annotations

from collections.abc import Mapping

from trainmedic_agent.counters import Counts
from trainmedic_agent.log_reading.cut_record import CutRecord


class LogCounters:
    """Counters of log reading. Any thread may write `Counts`, one each number."""

    def __init__(self) -> None:
        self.cuts = CutRecord()
        self.lines: Counts[str] = Counts()  # by source, as those left out
        self.lines_left_out: Counts[str] = Counts()
        self.findings: Counts[str] = Counts()  # by rule
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
