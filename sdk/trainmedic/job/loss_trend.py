"""Whether a job's loss has gone off for good, and how much it scatters, from its last reports.

Prometheus sees a loss once in a scrape, which is a step of many. What takes several steps in a row to tell is told
here. Who calls it: ``metrics``, when Prometheus asks. Not here: whether a checkpoint is ill
(``trainmedic.recovery.health``).
"""

from __future__ import annotations

import math
import statistics

from trainmedic.job.reported_values import ReportedValues, ReportRecord, number

_IN_A_ROW = 5  # reports
_SCATTERING = 100  # reports
_ENOUGH = 20


class LossTrend:
    """The trend of one job's loss. For one thread at a time, other than that of the training."""

    def __init__(self) -> None:
        self._read: dict[float, float] = {}  # losses by the time of their report: a tensor is read once

    def values(self, record: ReportRecord) -> dict[str, float]:
        """Metric names and values, those that are known."""
        losses = self._losses(record.last(_SCATTERING))
        values: dict[str, float] = {}
        last = losses[-_IN_A_ROW:]
        if len(last) == _IN_A_ROW and not any(map(math.isnan, last)):
            values["training_loss_lowest_of_five"] = min(last)
        finite = [loss for loss in losses if not math.isnan(loss)]
        if len(finite) >= _ENOUGH:
            median = statistics.median(finite)
            values["training_loss_spread"] = statistics.median(abs(loss - median) for loss in finite)
        return values

    def _losses(self, reports: list[ReportedValues]) -> list[float]:
        """The losses of those reports that had one, oldest first; NaN for what is not finite."""
        read: dict[float, float] = {}
        for report in reports:
            loss = self._read.get(report.at)
            if loss is None:
                loss = number(report.loss)
            if loss is not None:
                read[report.at] = loss
        self._read = read
        return list(read.values())
