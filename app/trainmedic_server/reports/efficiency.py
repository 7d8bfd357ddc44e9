"""A job's throughput compared with a baseline, and a score of its GPU use.

Score of the reference design: 100 × (0.6 × utilisation + 0.4 × min(throughput ÷ baseline, 1)), with two corrections:

- Utilisation is the mean of all GPUs.
- The baseline is fixed: the declared target, otherwise the job's beginning.

A GPU that waits in a collective is busy too, so the rating is never better than the throughput alone deserves.
"""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from datetime import datetime

from trainmedic_server.ports.metric_history import Points
from trainmedic_server.reports.points import whole_second

STABLE_SECONDS = 3600.0  # Stable throughput for this time is the baseline.
_STABLE_PRESENCE = 5 / 6  # Least share of that time with points.
FIRST_POINTS = 50  # Most points of a baseline from the beginning.
FEWEST_POINTS = 10  # Of a baseline.
_STABLE_SPREAD = 0.2  # Maximum spread of the middle 80 % of the points, as a share of their median.

_UTILISATION_WEIGHT = 0.6
_THROUGHPUT_WEIGHT = 0.4
_RATINGS = ((80.0, "excellent"), (60.0, "good"), (40.0, "fair"))
_POOR = "poor"
_RANKS = (*(name for _, name in _RATINGS), _POOR)


@dataclass(frozen=True, slots=True)
class UsualThroughput:
    value: float
    of: str
    """``target`` if declared; else ``first_stable_hour``, or ``first_points`` if there was none yet."""
    since: datetime
    until: datetime
    points: int


@dataclass(frozen=True, slots=True)
class Efficiency:
    score: float
    rating: str
    """``excellent`` (from 80), ``good`` (from 60), ``fair`` (from 40) or ``poor``, by the lower of the score and the
    throughput's percentage of the baseline.
    """
    throughput_share: float
    limited_by: str | None = None
    """``throughput`` if the score alone would give a better rating, otherwise None."""


def baseline(points: Points) -> UsualThroughput | None:
    """Return None for fewer than `FEWEST_POINTS` usable points."""
    usable = [(at, value) for at, value in points if math.isfinite(value) and value > 0]
    every = min((after - before for (before, _), (after, _) in itertools.pairwise(usable)), default=0.0)
    fewest = max(FEWEST_POINTS, _STABLE_PRESENCE * STABLE_SECONDS / every) if every > 0 else math.inf
    first = 0
    for last, (at, _) in enumerate(usable):
        while at - usable[first][0] > STABLE_SECONDS:
            first += 1
        window = usable[first : last + 1]
        is_whole = at - window[0][0] >= 0.95 * STABLE_SECONDS and len(window) >= fewest
        if is_whole and _is_stable([value for _, value in window]):
            return _median_of(window, "first_stable_hour")
    beginning = usable[:FIRST_POINTS]
    return _median_of(beginning, "first_points") if len(beginning) >= FEWEST_POINTS else None


def _is_stable(values: list[float]) -> bool:
    tenths = statistics.quantiles(values, n=10)
    return tenths[-1] - tenths[0] <= _STABLE_SPREAD * statistics.median(values)


def _median_of(points: Points, of: str) -> UsualThroughput:
    return _over(points, statistics.median(value for _, value in points), of)


def _over(points: Points, value: float, of: str) -> UsualThroughput:
    return UsualThroughput(value, of, whole_second(points[0][0]), whole_second(points[-1][0]), len(points))


def target(value: float | None, points: Points) -> UsualThroughput | None:
    if value is None or not math.isfinite(value) or value <= 0 or not points:
        return None
    return _over(points, value, "target")


def efficiency(utilisation_percent: float, throughput: float, usual: float) -> Efficiency:
    """`usual` is the baseline, above 0."""
    share = throughput / usual
    score = 100 * (_UTILISATION_WEIGHT * utilisation_percent / 100 + _THROUGHPUT_WEIGHT * min(share, 1.0))
    score = round(min(max(score, 0.0), 100.0), 1)
    of_score, of_throughput = _rating(score), _rating(round(100 * share, 1))
    is_limited = _RANKS.index(of_throughput) > _RANKS.index(of_score)
    return Efficiency(
        score,
        of_throughput if is_limited else of_score,
        throughput_share=round(share, 4),
        limited_by="throughput" if is_limited else None,
    )


def _rating(percent: float) -> str:
    return next((name for least, name in _RATINGS if percent >= least), _POOR)
