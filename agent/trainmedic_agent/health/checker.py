"""All checks of a level, and their record."""

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
from trainmedic_agent.health.checks import CheckResults, HealthReport, HealthVerdict, Level, is_usable
from trainmedic_agent.health.disk_checks import disk_checks
from trainmedic_agent.health.gpu_checks import gpu_checks
from trainmedic_agent.health.network_checks import MIN_RATE, network_checks, rate_checks
from trainmedic_agent.health.record import HealthRecord
from trainmedic_agent.health.sysfs import NodeRoots
from trainmedic_agent.ports.gpus import Gpus

log = logging.getLogger(__name__)


class Examination(Struct, frozen=True):
    """- ``gpus``: minimum number of responding GPUs
    - ``probe``: command of ``trainmedic-probe``
    - ``seconds``: limit of a load test
    - ``min_gbps``: minimum rate of links, Gbit/s; 0 checks none
    """

    level: Level = Level.QUICK
    gpus: int = 0
    probe: Sequence[str] = ()
    seconds: float = 0.0
    min_gbps: float = 0.0
    is_over: Callable[[], bool] = bool  # bool() is False


class HealthChecker(Struct, frozen=True):
    gpus: Gpus
    roots: NodeRoots
    now: Callable[[], datetime] = utc_now

    def examine(self, examination: Examination, histories: Histories) -> tuple[HealthReport, Histories]:
        """Return the result, and the changed histories. A node with a failed or unknown check is not loaded."""
        results = CheckResults()
        results.add(gpu_checks(self.gpus, examination.gpus))
        results.add(network_checks(self.roots.sys))
        results.add(disk_checks(self.roots))
        required = rate_checks(results.values, examination.min_gbps) if examination.min_gbps > 0 else []
        if examination.level is Level.BURN and is_usable([*results.checks, *required]):
            results.add(burn.burn_checks(self.gpus, examination.probe, examination.seconds, examination.is_over))
        now = self.now()
        compared = compare(results.values, histories, results.checks, now)
        checks = (*results.checks, *required, *compared.checks)
        return HealthReport(examination.level, now, checks, tuple(compared.learning)), compared.histories


class RecordedHealth(Struct, frozen=True):
    checker: HealthChecker
    record: HealthRecord

    def examine(self, examination: Examination) -> HealthReport:
        report, changed = self.checker.examine(examination, self.record.histories)
        of_load_test = tuple(check for check in report.checks if check.name in burn.CHECKS)
        # `MIN_RATE` is a requirement of this command, not part of the node's state, which alerts show.
        quick = tuple(check for check in report.checks if check.name not in (*burn.CHECKS, MIN_RATE))
        self._add(replace(report, level=Level.QUICK, checks=quick), changed)
        # Stored separately, because the next quick check would replace them. A load test that was ended says nothing.
        if of_load_test and not examination.is_over():
            self._add(replace(report, checks=of_load_test), {})
        return report

    def _add(self, report: HealthReport, changed: Histories) -> None:
        before = self.record.results.get(report.level)
        if before is None or before.faults != report.faults:
            fields = {"level": str(report.level), "verdict": str(report.verdict), "faults": report.faults}
            level = logging.INFO if report.verdict is HealthVerdict.OK else logging.WARNING
            log.log(level, "health checked", extra=fields)
        try:
            self.record.add(report, changed)
        except JournalUnavailable as error:
            log.warning("cannot record health", extra={"reason": str(error)})
