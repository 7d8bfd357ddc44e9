"""Level and scatter of a job's last losses, of which Prometheus samples too few."""

from __future__ import annotations

import math
import statistics
from typing import Collection, NamedTuple

from trainmedic.job.reported_values import ReportedValues, ReportRecord, number

_LOWEST_OF = 5  # losses
_SPREAD_OF = 100  # losses
_FEWEST_LOSSES = 20
# Losses whose median is a falling curve's level; odd.
_NEWEST = 11
# Fall in median absolute deviations; three are two standard deviations.
_CLEAR_FALL = 3.0


class UsualLevel(NamedTuple):
    level: float
    spread: float
    is_falling: bool = False


def usual_level(losses: Collection[float]) -> UsualLevel:
    """Return the level and scatter of finite losses, oldest first.

    For falling losses these are the newest ones' median, and the spread from neighbours' medians.
    """
    values = list(losses)
    median = statistics.median(values)
    whole = UsualLevel(median, statistics.median(abs(value - median) for value in values))
    if len(values) < _FEWEST_LOSSES:
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
    def __init__(self) -> None:
        self._read: dict[float, float] = {}  # by time of report: a tensor is read once

    def values(self, record: ReportRecord) -> dict[str, float]:
        losses = self._losses(record.last(_SPREAD_OF))
        values: dict[str, float] = {}
        last = losses[-_LOWEST_OF:]
        if len(last) == _LOWEST_OF and not any(map(math.isnan, last)):
            values["training_loss_lowest_of_five"] = min(last)
        finite = [loss for loss in losses if not math.isnan(loss)]
        if len(finite) >= _FEWEST_LOSSES:
            values["training_loss_spread"] = usual_level(finite).spread
        return values

    def _losses(self, reports: list[ReportedValues]) -> list[float]:
        read: dict[float, float] = {}
        for report in reports:
            loss = self._read.get(report.at)
            if loss is None:
                loss = number(report.loss)
            if loss is not None:
                read[report.at] = loss
        self._read = read
        return list(read.values())
