"""Level and scatter of a job's last losses; Prometheus samples too few."""

from __future__ import annotations

import math
import statistics
from typing import Collection, NamedTuple

from trainmedic.job.reported_values import ReportedValues, ReportRecord, number

_IN_A_ROW = 5
_SCATTERING = 100
_ENOUGH = 20
_NEWEST = 11
"""Losses whose median is a falling curve's level; odd."""
_CLEAR_FALL = 3.0
"""Fall in median absolute deviations; three are two standard deviations."""


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
    def __init__(self) -> None:
        self._read: dict[float, float] = {}  # by time of report: a tensor is read once

    def values(self, record: ReportRecord) -> dict[str, float]:
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
        read: dict[float, float] = {}
        for report in reports:
            loss = self._read.get(report.at)
            if loss is None:
                loss = number(report.loss)
            if loss is not None:
                read[report.at] = loss
        self._read = read
        return list(read.values())
