"""Budgets of findings and lines per job, user and file. Not thread-safe."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainmedic_agent.log_reading.budgets import HOUR, NODE_ITSELF, UNKNOWN_USER, BudgetOwner, HourlyBudget
from trainmedic_agent.log_reading.cut_record import CutRecord
from trainmedic_agent.log_reading.line_cutter import PlacedLine
from trainmedic_logs.domain.finding import Finding
from trainmedic_logs.domain.log_cuts import CutKind
from trainmedic_logs.domain.log_sources import KERNEL_SOURCES

_MOST_REMEMBERED = 20_000  # IDs of findings
_SAVED_SECONDS = 10.0  # seconds of budget for lines that a job or file can save
_SAMPLE_INTERVAL = 100  # of lines beyond the budget, one in so many is processed


class FindingsOfJobs:
    """Admits findings within the budget. Updates of admitted ones, and ends unless refused, are free."""

    def __init__(self, most: int, cuts: CutRecord, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._budget = HourlyBudget(most, monotonic)
        self._cuts = cuts
        self._refused: dict[str, None] = {}
        self._admitted: dict[str, BudgetOwner] = {}

    def admit(self, owner: BudgetOwner, finding: Finding) -> bool:
        """Return whether to report the finding. A refusal is recorded."""
        if finding.id in self._refused:
            return False
        if finding.is_over or finding.id in self._admitted:  # an end, or an update
            return True
        is_admitted = self._budget.take(owner)
        if is_admitted:
            self._admitted[finding.id] = owner
        else:
            self._refused[finding.id] = None
            self._cuts.add(owner, CutKind.FINDINGS)
        for remembered in (self._admitted, self._refused):
            if len(remembered) > _MOST_REMEMBERED:
                del remembered[next(iter(remembered))]
        return is_admitted

    def owner_of(self, finding: Finding) -> BudgetOwner:
        """Return the finding's owner, for an earlier process's finding only the job."""
        if finding.origin.source in KERNEL_SOURCES:
            return NODE_ITSELF
        return self._admitted.get(finding.id) or BudgetOwner(UNKNOWN_USER, finding.origin.job)

    def was_admitted(self, finding: Finding) -> bool:
        """Return False for a refused finding; True also for an earlier process's."""
        return finding.id not in self._refused


class LinesOfJobs:
    def __init__(self, per_second: int, cuts: CutRecord, monotonic: Callable[[], float] = time.monotonic) -> None:
        # With a faster clock the budget refills in `_SAVED_SECONDS` instead of an hour.
        self._budget = HourlyBudget(per_second * _SAVED_SECONDS, lambda: monotonic() * HOUR / _SAVED_SECONDS)
        self._cuts = cuts

    def within(self, owner: BudgetOwner, lines: list[PlacedLine]) -> list[PlacedLine]:
        """Return the lines within the budget, then a sample of the others."""
        free = self._taken(owner, len(lines))
        if free >= len(lines):
            return lines
        kept = [*lines[:free], *lines[free::_SAMPLE_INTERVAL]]
        self._cuts.add(owner, CutKind.LINES, len(lines) - len(kept))
        return kept

    def _taken(self, owner: BudgetOwner, count: int) -> int:
        """Return how many of `count` lines may be processed: all, half, a quarter, and so on."""
        while count > 0 and not self._budget.take(owner, count):
            count //= 2
        return count


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
