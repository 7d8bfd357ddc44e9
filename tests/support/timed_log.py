"""A log file whose lines arrive at times that a test says, as the agent notes them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from trainmedic_agent.log_reading.arrivals import ArrivalIndex
from trainmedic_agent.log_search.file_lines import FileLines
from trainmedic_agent.log_search.line_filter import LineFilter
from trainmedic_agent.log_search.wanted_lines import ReadBudget
from trainmedic_logs.domain.finding import Origin
from trainmedic_logs.domain.log_search import FoundLine, LogQuery

LOOK = timedelta(milliseconds=250)


class TimedLog:
    """One file. Without an index nobody has looked at it."""

    def __init__(self, path: Path, index: ArrivalIndex | None, began: datetime) -> None:
        self.path = path
        self.index = index
        self.now = began
        self.path.touch()
        self._look()

    def wait(self, seconds: float) -> None:
        """Let time pass in which the agent looks, the last time right before the end of it."""
        self.now += timedelta(seconds=seconds) - LOOK
        self._look()
        self.now += LOOK

    def write(self, *lines: str) -> None:
        with self.path.open("ab") as file:
            file.writelines(f"{line}\n".encode() for line in lines)
        os.utime(self.path, (self.now.timestamp(), self.now.timestamp()))
        self._look()

    def _look(self) -> None:
        if self.index is not None:
            facts = self.path.stat()
            self.index.record_look((facts.st_dev, facts.st_ino), facts.st_size, facts.st_mtime_ns, self.now)

    def lines(self, query: LogQuery, zone: object = None, origin: Origin | None = None) -> list[FoundLine]:
        lines, _ = self.answer(query, zone, origin)
        return lines

    def answer(
        self, query: LogQuery, zone: object = None, origin: Origin | None = None
    ) -> tuple[list[FoundLine], FileLines]:
        """The lines that answer, and what has read them."""
        whose = origin if origin is not None else Origin("training", "n1", query.job)
        budget = ReadBudget(1 << 32, 60.0)
        with self.path.open("rb") as opened:
            file = FileLines(opened.fileno(), whose, LineFilter.of(query), budget, self.index, zone)  # type: ignore[arg-type]
            file.begin({})
            found: list[FoundLine] = []
            while (line := file.next()) is not None:
                found.append(line)
        return found, file


def texts(lines: Sequence[FoundLine]) -> list[str]:
    """The last word of each."""
    return [line.text.rpartition(" ")[2] for line in lines]
