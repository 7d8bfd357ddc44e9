"""Times when a job's metric was out of bounds.

Bounds: shipped alert rules and the reference design.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from trainmedic_server.ports.metric_history import Points
from trainmedic_server.reports import points as figures

MOST = 100  # Newest anomalies in a report. All are counted.
_FEWEST_POINTS = 10  # For a relative limit.
_LEAST_RELATIVE_LIMIT = 0.01  # As in the rule TrainingLossUnstable: near 0, any change is a large multiple.


@dataclass(frozen=True, slots=True)
class Bound:
    kind: str
    query: str  # PromQL with ``$job`` for the matcher and ``$every`` for the interval.
    limit: float
    summary: str  # With {worst} and {limit}.
    is_over: bool = True  # False if values under the limit are out of bounds.
    at_least: int = 1  # Consecutive points.
    relative: bool = False
    """The limit is a factor of the series' mean if below 1, otherwise of its median."""


@dataclass(frozen=True, slots=True)
class AnomalousGpu:
    """A GPU with its worst mean, in percent."""

    uuid: str
    node: str
    worst: float


@dataclass(frozen=True, slots=True)
class AnomalyRecord:
    """Period out of bounds."""

    kind: str
    since: datetime
    until: datetime
    worst: float | None  # None if it was not finite.
    limit: float | None  # None if only values that are not finite are out of bounds.
    summary: str
    gpus: tuple[AnomalousGpu, ...] = ()
    gpu_count: int | None = None
    """Most GPUs out of bounds at one time. None if GPUs are not counted."""


BOUNDS = (
    Bound(
        "loss_high", "max_over_time(training_loss_lowest_of_five{$job}[$every])", 1e3, "five losses were over {limit}"
    ),
    # An average with one NaN is NaN.
    Bound("loss_not_finite", "avg_over_time(training_loss{$job}[$every])", math.inf, "the loss was not a number"),
    Bound(
        "gradient_explosion",
        "max_over_time(gradient_norm{$job}[$every])",
        100.0,
        "the gradient norm was {worst}, over {limit}",
    ),
    Bound(
        "loss_unstable",
        "max_over_time(training_loss_spread{$job}[$every])",
        5.0,
        "the losses scattered by {worst}; over {limit} is five times as much as usual",
        relative=True,
    ),
    Bound(
        "throughput_drop",
        "avg_over_time(training_throughput_samples_per_second{$job}[$every])",
        0.7,
        "the throughput was {worst} samples/s, under 70 % of its mean",
        is_over=False,
        at_least=3,
        relative=True,
    ),
    Bound(
        "memory_growth",
        "min_over_time(training_memory_growth_bytes_per_step{$job}[$every])",
        50e6,
        "memory grew by {worst} bytes with every step",
    ),
    Bound(
        "learning_rate_off",
        "max_over_time(training_learning_rate_deviation{$job}[$every])",
        0.05,
        "the learning rate differed from its schedule by {worst} of it",
    ),
    Bound(
        "ranks_differ",
        "max_over_time(training_ranks_differing{$job}[$every])",
        0.0,
        "the weights of {worst} rank(s) were not those of the others",
    ),
    Bound(
        "gpu_hot",
        # Only the points over the limit: a job may have thousands of GPUs.
        "max by (uuid) (max_over_time(gpu_temperature_celsius[$every]) * on (uuid) group_left () $gpus) > 85",
        85.0,
        "a GPU was at {worst} °C",
    ),
)


def anomalies(bound: Bound, points: Points, every: float) -> list[AnomalyRecord]:
    limit = _limit(bound, points)
    if limit is None:
        return []

    def is_out(value: float) -> bool:
        if not math.isfinite(value):
            return bound.limit == math.inf  # The bound of such values alone.
        return value > limit if bound.is_over else value < limit

    worst: Callable[[Iterable[float]], float] = max if bound.is_over else min
    return [
        AnomalyRecord(
            bound.kind,
            figures.whole_second(excursion.begin),
            figures.whole_second(excursion.end),
            excursion.worst if math.isfinite(excursion.worst) else None,
            limit if math.isfinite(limit) else None,
            bound.summary.format(worst=f"{excursion.worst:.4g}", limit=f"{limit:.4g}"),
        )
        for excursion in figures.excursions(points, every, is_out, bound.at_least, worst)
    ]


def _limit(bound: Bound, points: Points) -> float | None:
    """Return None if a relative limit has too few points."""
    if not bound.relative:
        return bound.limit
    values = figures.finite(points)
    if len(values) < _FEWEST_POINTS:
        return None
    if bound.limit < 1:
        return statistics.fmean(values) * bound.limit
    return max(statistics.median(values) * bound.limit, _LEAST_RELATIVE_LIMIT)


def newest(all_anomalies: Sequence[AnomalyRecord]) -> list[AnomalyRecord]:
    return sorted(all_anomalies, key=lambda anomaly: (-anomaly.since.timestamp(), anomaly.kind))[:MOST]
