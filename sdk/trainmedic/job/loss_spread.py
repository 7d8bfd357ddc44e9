"""Comparison of the ranks' losses."""

from __future__ import annotations

import math
import statistics
from typing import Any, Iterable, Mapping, Sequence

_MOST_OUTLIERS = 12
_MOST_SPANS = 20
_CURVE_POINTS = 33
_FEWEST_FOR_OUTLIERS = 4  # losses
_OUTLIER_FACTOR = 8.0  # median distances; one normally distributed rank in millions is that far
_OUTLIER_LEAST = 0.01  # share of the median, to exclude rounding
_NOT_FINITE = ("nan", "inf", "-inf")


def loss_spread(ranks: Mapping[int, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Summarize the ranks' ``loss``; None without any. Non-finite ones are listed by kind, as JSON has no NaN."""
    losses = {
        rank: float(value)
        for rank, figures in ranks.items()
        if isinstance(value := figures.get("loss"), (int, float)) and not isinstance(value, bool)
    }
    if not losses:
        return None
    finite = {rank: value for rank, value in losses.items() if math.isfinite(value)}
    spread: dict[str, Any] = {"ranks": len(losses), "steps": _steps(ranks[rank].get("loss_step") for rank in losses)}
    for kind in _NOT_FINITE:
        odd = [rank for rank, value in losses.items() if not math.isfinite(value) and str(value) == kind]
        if odd:
            spread[kind] = {"count": len(odd), "ranks": rank_spans(odd)}
    if not finite:
        return spread

    def entry(rank: int) -> dict[str, Any]:
        return {"rank": rank, "node": str(ranks[rank].get("node", "")), "loss": finite[rank]}

    ordered = sorted(finite, key=lambda rank: finite[rank])
    values = [finite[rank] for rank in ordered]
    median = statistics.median(values)
    outliers = _outliers(finite, median)
    return {
        **spread,
        "lowest": entry(ordered[0]),
        "median": median,
        "highest": entry(ordered[-1]),
        "curve": _curve(values),
        "apart": [entry(rank) for rank in outliers[:_MOST_OUTLIERS]],
        "apart_count": len(outliers),
    }


def rank_spans(ranks: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans[:_MOST_SPANS])
    left = sum(last - first + 1 for first, last in spans[_MOST_SPANS:])
    return f"{shown} and {left} more" if left else shown


def _outliers(finite: Mapping[int, float], median: float) -> list[int]:
    if len(finite) < _FEWEST_FOR_OUTLIERS:
        return []
    distances = {rank: abs(value - median) for rank, value in finite.items()}
    limit = max(_OUTLIER_FACTOR * statistics.median(distances.values()), _OUTLIER_LEAST * abs(median))
    return sorted((rank for rank, far in distances.items() if far > limit), key=lambda rank: -distances[rank])


def _curve(values: Sequence[float]) -> list[float]:
    if len(values) <= _CURVE_POINTS:
        return list(values)
    last = len(values) - 1
    return [values[round(point * last / (_CURVE_POINTS - 1))] for point in range(_CURVE_POINTS)]


def _steps(steps: Iterable[Any]) -> list[int] | None:
    numbers = [step for step in steps if isinstance(step, int) and not isinstance(step, bool)]
    return [min(numbers), max(numbers)] if numbers else None
