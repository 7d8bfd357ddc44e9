from __future__ import annotations

import time
from collections.abc import Callable

from trainmedic_agent.log_reading.budgets import BudgetOwner, SharedLines
from trainmedic_agent.log_reading.cut_record import CutRecord
from trainmedic_agent.log_reading.line_cutter import PlacedLine
from trainmedic_logs.domain.log_cuts import CutKind

_SECONDS = 10.0
"""Seconds of budget that a file can save."""
_ONE_IN = 100
"""Sampling of lines beyond the budget."""


class LinesOfJobs:
    def __init__(self, per_second: int, cuts: CutRecord, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._lines = SharedLines(per_second, monotonic)
        self._cuts = cuts

    def within(self, owner: BudgetOwner, lines: list[PlacedLine]) -> list[PlacedLine]:
        """Return all lines within the bound, then a sample."""
        free = self._lines.within(owner, len(lines))
        if free >= len(lines):
            return lines
        kept = [*lines[:free], *lines[free::_ONE_IN]]
        self._cuts.add(owner, CutKind.LINES, len(lines) - len(kept))
        return kept


class LineBudget:
    def __init__(self, per_second: int | None) -> None:
        self._per_second = per_second
        self._left = (per_second or 0) * _SECONDS
        self._counted_at: float | None = None

    def within(self, lines: list[PlacedLine], now: float) -> list[PlacedLine]:
        """As `LinesOfJobs.within`. `now` is monotonic, in seconds."""
        if self._per_second is None:
            return lines
        if self._counted_at is not None:
            saved = self._left + (now - self._counted_at) * self._per_second
            self._left = min(saved, self._per_second * _SECONDS)
        self._counted_at = now
        free = int(self._left)
        self._left -= min(free, len(lines))
        return lines if len(lines) <= free else [*lines[:free], *lines[free::_ONE_IN]]
