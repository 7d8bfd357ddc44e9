# Calculations with the points of a Prometheus series. Times and lengths are in seconds.
from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from trainmedic_server.ports.metric_history import Points


@dataclass(frozen=True, slots=True)
class Spread:
    """Average and extremes of a quantity in a period, finite and in its unit."""

    average: float
    max: float
    min: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """Uninterrupted period, in seconds since 1970."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Excursion:
    """Period out of bounds with its worst value, which is infinite or NaN if any value was."""

    begin: float
    end: float
    worst: float


def whole_second(seconds: float) -> datetime:
    return datetime.fromtimestamp(math.floor(seconds), UTC)


def finite(points: Points) -> list[float]:
    return [value for _, value in points if math.isfinite(value)]


def average(points: Points) -> float | None:
    values = finite(points)
    return statistics.fmean(values) if values else None


def spread(
    averages: Points, highest: Points | None = None, lowest: Points | None = None, counts: Points = ()
) -> Spread | None:
    """Return None without a finite average. `counts` weight the averages."""
    values = finite(averages)
    if not values:
        return None
    weight_at = dict(counts)
    weights = [weight_at.get(at, 1.0) for at, value in averages if math.isfinite(value)]
    top = finite(highest or ()) or values
    bottom = finite(lowest or ()) or values
    return Spread(statistics.fmean(values, weights), max(top), min(bottom))


def rise(points: Points, is_from_zero: bool) -> float:
    """Return a counter's increase. It began at 0 before each lower value, and before the first if `is_from_zero`."""
    values = finite(points)
    risen = values[0] if values and is_from_zero else 0.0
    for before, after in itertools.pairwise(values):
        risen += after - before if after >= before else after
    return risen


def stretches(points: Points, every: float) -> list[Stretch]:
    """Join points to uninterrupted periods. Each point covers the `every` seconds before it."""
    joined: list[Stretch] = []
    for at, _ in points:
        if joined and at - joined[-1].end <= 1.5 * every:
            joined[-1] = Stretch(joined[-1].begin, at)
        else:
            joined.append(Stretch(at - every, at))
    return joined


def gaps(present: Sequence[Stretch]) -> list[Stretch]:  # between them
    return [Stretch(before.end, after.begin) for before, after in itertools.pairwise(present)]


def overlap(stretch: Stretch, others: Iterable[Stretch]) -> float:
    """Return seconds. `others` must not overlap each other."""
    return sum(max(min(stretch.end, other.end) - max(stretch.begin, other.begin), 0.0) for other in others)


def excursions(
    points: Points,
    every: float,
    is_out: Callable[[float], bool],
    at_least: int = 1,
    worst: Callable[[Iterable[float]], float] = max,
) -> list[Excursion]:
    """Return the periods in which `is_out` held for at least `at_least` consecutive points."""
    runs: list[list[tuple[float, float]]] = [[]]
    for at, value in points:
        if runs[-1] and (not is_out(value) or at - runs[-1][-1][0] > 1.5 * every):
            runs.append([])
        if is_out(value):
            runs[-1].append((at, value))
    return [
        Excursion(run[0][0] - every, run[-1][0], _worst([value for _, value in run], worst))
        for run in runs
        if run and len(run) >= at_least
    ]


def _worst(values: Sequence[float], worst: Callable[[Iterable[float]], float]) -> float:
    return next((value for value in values if not math.isfinite(value)), worst(values))
