"""All checks of a level, one level at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime

from msgspec import Struct
from msgspec.structs import replace

from trainmedic.wire.steady_time import utc_now
from trainmedic_agent.errors import JournalUnavailable
from trainmedic_agent.health import burn
from trainmedic_agent.health.baseline import Histories, compare
from trainmedic_agent.health.checks import Found, HealthReport, Level, Verdict, worst
from trainmedic_agent.health.disk_checks import disk_checks
from trainmedic_agent.health.gpu_checks import gpu_checks
from trainmedic_agent.health.network_checks import network_checks
from trainmedic_agent.health.record import HealthRecord
from trainmedic_agent.health.sysfs import NodeRoots
from trainmedic_agent.ports.gpus import Gpus

log = logging.getLogger(__name__)


class Examination(Struct, frozen=True):
    """- ``gpus``: minimum number of responding GPUs
    - ``probe``: command of ``trainmedic-probe``
    - ``seconds``: limit of a load test
    """

    level: Level = Level.QUICK
    gpus: int = 0
    probe: Sequence[str] = ()
    seconds: float = 0.0
    is_over: Callable[[], bool] = bool


class HealthChecker(Struct, frozen=True):
    gpus: Gpus
    roots: NodeRoots
    now: Callable[[], datetime] = utc_now

    def examine(self, wanted: Examination, known: Histories) -> tuple[HealthReport, Histories]:
        """Return the result, and the changed histories. A node that already failed is not loaded."""
        found = Found()
        for part in (
            gpu_checks(self.gpus, wanted.gpus),
            network_checks(self.roots.sys),
            disk_checks(self.roots),
        ):
            found.add(part)
        if wanted.level is Level.BURN and worst([Verdict.OK, *(each.verdict for each in found.checks)]) != "failed":
            found.add(burn.burn_checks(self.gpus, wanted.probe, wanted.seconds, wanted.is_over))
        now = self.now()
        compared = compare(found.values, known, found.checks, now)
        checks = (*found.checks, *compared.checks)
        return HealthReport(wanted.level, now, checks, tuple(compared.learning)), compared.histories


class RecordedHealth(Struct, frozen=True):
    """The checker with the node's record."""

    checker: HealthChecker
    record: HealthRecord

    def examine(self, wanted: Examination) -> HealthReport:
        report, changed = self.checker.examine(wanted, self.record.histories)
        is_quick = {True: [], False: []}
        for check in report.checks:
            is_quick[check.name not in burn.CHECKS].append(check)
        self._add(replace(report, level=Level.QUICK, checks=tuple(is_quick[True])), changed)
        if is_quick[False]:
            self._add(replace(report, checks=tuple(is_quick[False])), {})
        return report

    def _add(self, report: HealthReport, changed: Histories) -> None:
        before = self.record.results.get(report.level)
        if before is None or before.faults != report.faults:
            fields = {"level": str(report.level), "verdict": str(report.verdict), "faults": report.faults}
            log.log(logging.INFO if report.verdict is Verdict.OK else logging.WARNING, "health checked", extra=fields)
        try:
            self.record.add(report, changed)
        except JournalUnavailable as error:
            log.warning("cannot record health", extra={"reason": str(error)})
