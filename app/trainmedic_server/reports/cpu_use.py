"""CPU cores kept busy by a job's ranks and their child processes.

Only the busiest and the least busy ranks have a series.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainmedic_server.ports.metric_history import MetricSeries, Points
from trainmedic_server.reports import points as figures

_FAR_OFF = 2.0
"""An outlier has more than this multiple of the median, or less than the median divided by it."""
_LEAST_CORES = 0.5
"""An outlier's minimum difference in cores: near 0, small differences are large multiples."""

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class RankCpu:
    """A rank and its average number of busy cores."""

    rank: str
    node: str
    cores: float
    is_outlier: bool


@dataclass(frozen=True, slots=True)
class CpuUse:
    median_cores: float  # Of all ranks.
    highest: tuple[RankCpu, ...]  # At or above the median, the busiest first.
    lowest: tuple[RankCpu, ...]  # Below it, the least busy first.


def cpu_use(median: Points, ranks: Sequence[MetricSeries]) -> CpuUse | None:
    usual = figures.average(median)
    if usual is None:
        return None
    known = [(average, series) for series in ranks if (average := figures.average(series.points)) is not None]
    longest = max((len(series.points) for _, series in known), default=0)
    # Only extremes have a series. One that is an extreme only briefly has no reliable average.
    lasting = [
        RankCpu(
            series.labels.get("rank", "?"),
            series.labels.get("rank_node", "?"),
            round(average, 3),
            _is_far_off(average, usual),
        )
        for average, series in known
        if 2 * len(series.points) >= longest
    ]
    ordered = sorted(lasting, key=lambda each: (-each.cores, each.rank))
    above = [each for each in ordered if each.cores >= usual]
    below = [each for each in reversed(ordered) if each.cores < usual]
    return CpuUse(round(usual, 3), tuple(above[:_SHOWN]), tuple(below[:_SHOWN]))


def _is_far_off(cores: float, usual: float) -> bool:
    if abs(cores - usual) < _LEAST_CORES:
        return False
    return cores > _FAR_OFF * usual or cores < usual / _FAR_OFF
