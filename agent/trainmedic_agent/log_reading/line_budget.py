from __future__ import annotations

import time
from collections.abc import Callable

from trainmedic_agent.log_reading.budgets import BudgetOwner, SharedLines
from trainmedic_agent.log_reading.cut_record import CutRecord
from trainmedic_agent.log_reading.line_cutter import PlacedLine
from trainmedic_logs.domain.log_cuts import CutKind

_SAVED_SECONDS = 10.0  # seconds of budget that a file can save
_SAMPLE_INTERVAL = 100  # of lines beyond the budget, one in so many is processed


class LinesOfJobs:
    def __init__(self, per_second: int, cuts: CutRecord, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._lines = SharedLines(per_second, monotonic)
        self._cuts = cuts

    def within(self, owner: BudgetOwner, lines: list[PlacedLine]) -> list[PlacedLine]:
        """Return the lines within the budget, then a sample of the others."""
        free = self._lines.within(owner, len(lines))
        if free >= len(lines):
            return lines
        kept = [*lines[:free], *lines[free::_SAMPLE_INTERVAL]]
        self._cuts.add(owner, CutKind.LINES, len(lines) - len(kept))
        return kept


class LineBudget:
    """Lines of one file. None: unlimited."""

    def __init__(self, per_second: int | None) -> None:
        self._per_second = per_second
        self._left = (per_second or 0) * _SAVED_SECONDS
        self._counted_at: float | None = None

    def within(self, lines: list[PlacedLine], now: float) -> list[PlacedLine]:
        """Return the lines within the budget. The caller counts the others. `now` is monotonic, in seconds."""
        if self._per_second is None:
            return lines
        if self._counted_at is not None:
            saved = self._left + (now - self._counted_at) * self._per_second
            self._left = min(saved, self._per_second * _SAVED_SECONDS)
        self._counted_at = now
        free = int(self._left)
        self._left -= min(free, len(lines))
        return lines if len(lines) <= free else [*lines[:free], *lines[free::_SAMPLE_INTERVAL]]
