"""Number of findings that one job may report within an hour, so that no job takes the place of others' findings.

Who calls it: ``rule_runner``, under its lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from trainmedic_server.agent.log_reading.budgets import BudgetOwner, HourlyBudget
from trainmedic_server.agent.log_reading.cut_record import CutRecord
from trainmedic_server.domain.finding import Finding
from trainmedic_server.domain.log_cuts import CutKind

_MOST_REMEMBERED = 20_000


class FindingsOfJobs:
    """Admits the first word on a finding, and its later ones if the first was admitted."""

    def __init__(
        self, most: int, cuts: CutRecord | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._budget = HourlyBudget(most, monotonic)
        self._cuts = cuts or CutRecord()
        self._refused: dict[str, None] = {}
        self._admitted: dict[str, None] = {}

    def admits(self, owner: BudgetOwner, finding: Finding) -> bool:
        """Return whether the finding is to be reported. A new one counts."""
        if finding.id in self._refused:
            return False
        if finding.is_over or finding.id in self._admitted:
            return True
        is_admitted = self._budget.take(owner)
        remembered = self._admitted if is_admitted else self._refused
        remembered[finding.id] = None
        if len(remembered) > _MOST_REMEMBERED:
            del remembered[next(iter(remembered))]
        if not is_admitted:
            self._cuts.add(owner, CutKind.FINDINGS)
        return is_admitted

    def was_admitted(self, finding: Finding) -> bool:
        """Return whether a later word on the finding is to be reported."""
        return finding.id not in self._refused
