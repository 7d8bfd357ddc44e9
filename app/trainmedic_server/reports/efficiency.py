"""How well a job uses its GPUs: its throughput against a baseline, and one score. Pure.

The score is that of the reference design, 0.6 × utilisation + 0.4 × min(throughput ÷ baseline, 1), times 100, with two
of its faults mended. It took the utilisation of one GPU for that of the job; here it is the mean over all of them, so
one that idles is seen. And it took the baseline from the same time as the throughput, so that a job which had been slow
throughout was as good as its baseline, and a lucky moment made all others bad; here the baseline is fixed: the target
that the job declares, else the beginning of the job.

Busy GPUs weigh more in the score than the throughput, and a GPU is also busy while it waits in a collective operation.
So the rating is never better than the throughput alone deserves.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from trainmedic_server.ports.metric_history import Points

STABLE_SECONDS = 3600.0
"""How long the throughput must have been stable to be the baseline."""
FIRST_POINTS = 50
"""So many of the first points are the baseline of a job that was never stable for so long."""
FEWEST_POINTS = 10
_STABLE_SPREAD = 0.2
"""A throughput is stable while the middle eight tenths of its points lie within a fifth of their median."""

_UTILISATION_WEIGHT = 0.6
_THROUGHPUT_WEIGHT = 0.4
_RATINGS = ((80.0, "excellent"), (60.0, "good"), (40.0, "fair"))
_POOR = "poor"
_RANKS = (*(name for _, name in _RATINGS), _POOR)


@dataclass(frozen=True, slots=True)
class Baseline:
    """The throughput that a job is held against."""

    value: float
    """The target, or the median, in the throughput's unit."""
    of: str
    """``target`` if the job declares one; else ``first_stable_hour``, or ``first_points`` if there was none yet."""
    begin: float
    """Seconds since 1970."""
    end: float
    points: int
    """How many it is the median of."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The score, from 0 to 100, and what it is called."""

    score: float
    rating: str
    """``excellent`` (from 80), ``good`` (from 60), ``fair`` (from 40), or ``poor``. It follows the lower of the score
    and the throughput's percentage of the baseline."""
    throughput_share: float
    """Throughput divided by the baseline. More than 1 is better than the baseline."""
    limited_by: str | None = None
    """``throughput`` if the score alone would give a better rating; else None."""


def baseline(points: Points) -> Baseline | None:
    """The baseline that these points make, which begin with the job; None where they are fewer than `FEWEST_POINTS`."""
    usable = [(at, value) for at, value in points if math.isfinite(value) and value > 0]
    first = 0
    for last, (at, _) in enumerate(usable):
        while at - usable[first][0] > STABLE_SECONDS:
            first += 1
        window = usable[first : last + 1]
        if at - window[0][0] >= 0.95 * STABLE_SECONDS and _is_stable([value for _, value in window]):
            return _median_of(window, "first_stable_hour")
    beginning = usable[:FIRST_POINTS]
    return _median_of(beginning, "first_points") if len(beginning) >= FEWEST_POINTS else None


def _is_stable(values: list[float]) -> bool:
    if len(values) < FIRST_POINTS:
        return False
    tenths = statistics.quantiles(values, n=10)
    return tenths[-1] - tenths[0] <= _STABLE_SPREAD * statistics.median(values)


def _median_of(points: Points, of: str) -> Baseline:
    return Baseline(statistics.median(value for _, value in points), of, points[0][0], points[-1][0], len(points))


def target(value: float | None, points: Points) -> Baseline | None:
    """Return the target throughput that the job declares, from the last of `points`. None if it declares none."""
    if value is None or not math.isfinite(value) or value <= 0 or not points:
        return None
    return Baseline(value, "target", points[0][0], points[-1][0], len(points))


def efficiency(utilisation_percent: float, throughput: float, usual: float) -> Efficiency:
    """The score of a job whose GPUs were busy for `utilisation_percent` of the time, on average over all of them.

    ``usual`` is the baseline, above 0.
    """
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
