"""Hourly budget of findings per job and user. The caller has a lock."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainmedic_agent.log_reading.budgets import NODE_ITSELF, UNKNOWN_USER, BudgetOwner, HourlyBudget
from trainmedic_agent.log_reading.cut_record import CutRecord
from trainmedic_logs.domain.finding import Finding
from trainmedic_logs.domain.log_cuts import CutKind
from trainmedic_logs.domain.log_sources import KERNEL_SOURCES

_MOST_REMEMBERED = 20_000  # IDs of findings


class FindingsOfJobs:
    """Admits new findings within the budget, updates of admitted ones, and ends unless refused before."""

    def __init__(
        self, most: int, cuts: CutRecord | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._budget = HourlyBudget(most, monotonic)
        self._cuts = cuts or CutRecord()
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
