"""Whether a job's loss has gone off for good, and how much it scatters, from its last reports.

Prometheus sees a loss once in a scrape, which is a step of many. What takes several steps in a row to tell is told
here, and what is usual for a loss that falls. Who calls it: ``metrics``, when Prometheus asks, and
``trainmedic.recovery.health``, which judges checkpoints.
"""

from __future__ import annotations

import math
import statistics
from typing import Collection, NamedTuple

from trainmedic.job.reported_values import ReportedValues, ReportRecord, number

_IN_A_ROW = 5  # reports
_SCATTERING = 100  # reports
_ENOUGH = 20
_NEWEST = 11
"""Newest losses whose median is the level of a falling curve; odd, and so few that the curve falls little in them."""
_CLEAR_FALL = 3.0
"""A fall is one of more than three median absolute deviations (two standard deviations). The median of eleven losses
scatters by a third of one, so noise alone is not taken for a fall."""


class UsualLevel(NamedTuple):
    """What is usual for the next loss."""

    level: float
    spread: float
    """Median absolute deviation."""
    is_falling: bool = False


def usual_level(losses: Collection[float]) -> UsualLevel:
    """Return the level and scatter of consecutive losses, oldest first: at least one, all finite.

    Where they fall, the median of all is too high for the next one, and the deviations from it are the fall's own. So
    there the level is the median of the newest, and the spread that of each loss from the median of its neighbours. A
    rise changes neither: it must not become what is usual.
    """
    values = list(losses)
    median = statistics.median(values)
    whole = UsualLevel(median, statistics.median(abs(value - median) for value in values))
    if len(values) < _ENOUGH:
        return whole
    newest = statistics.median(values[-_NEWEST:])
    if newest >= median:
        return whole
    reach = _NEWEST // 2
    apart = [
        abs(value - statistics.median(values[max(at - reach, 0) : at + reach + 1])) for at, value in enumerate(values)
    ]
    spread = statistics.median(apart)
    is_falling = median - newest > _CLEAR_FALL * spread
    return UsualLevel(newest, spread, True) if is_falling else whole


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
            values["training_loss_spread"] = usual_level(finite).spread
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
