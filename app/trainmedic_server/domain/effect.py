"""Measured effect of a run on the alert's metric, 10 minutes after its first act."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from datetime import datetime, timedelta
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_server.domain.promql import Comparison

BEFORE = timedelta(minutes=10)  # measured period before the act
AFTER = timedelta(minutes=10)  # measured period after it
EVERY = timedelta(seconds=30)  # between two values
AROUND = timedelta(minutes=2)
"""Period of the medians, and maximum age of the value at the act."""
LEAST_CHANGE = 0.1  # share of the larger value; a smaller one counts as none


class EffectVerdict(StrEnum):
    """Measured change, not necessarily caused by the run."""

    PENDING = "pending"
    HELPED = "helped"
    NO_CHANGE = "no_change"
    WORSE = "worse"
    NOT_MEASURED = "not_measured"


class Effect(Struct, frozen=True):
    run_id: str
    playbook: str
    acted_at: datetime
    due_at: datetime | None  # next measurement; None if finished
    verdict: EffectVerdict = EffectVerdict.PENDING
    reason: str | None = None
    query: str | None = None  # None until derived from the alert's rule
    origin: str = "rule"  # of the query, or "playbook"
    better: str | None = None  # "lower" or "higher"; None if unknown
    operator: str | None = None  # of the rule's condition, with its limit; None without one
    limit: float | None = None
    before: float | None = None  # medians before and after, and the value at the act; None without a finite one
    at: float | None = None
    after: float | None = None
    series: tuple[tuple[float, float | None], ...] = ()  # (seconds since 1970, value); None if not finite

    def not_measured(self, reason: str) -> Effect:
        return replace(self, due_at=None, verdict=EffectVerdict.NOT_MEASURED, reason=reason)


def measured(effect: Effect, points: Sequence[tuple[float, float]], comparison: Comparison | None) -> Effect:
    """Return the effect from (seconds since 1970, value) of one series.

    `comparison` is the alert's condition, if the query is from its rule.
    """
    act = effect.acted_at.timestamp()
    before = _median(points, act - BEFORE.total_seconds(), act - (BEFORE - AROUND).total_seconds())
    at = next((value for time, value in reversed(points) if act - AROUND.total_seconds() <= time <= act), None)
    after = _median(points, act + (AFTER - AROUND).total_seconds(), act + AFTER.total_seconds())
    known = replace(
        effect,
        due_at=None,
        better=comparison.better if comparison else effect.better,
        operator=comparison.operator if comparison else None,
        limit=comparison.limit if comparison else None,
        before=_finite(before),
        at=_finite(at),
        after=_finite(after),
        series=tuple((time, _finite(value)) for time, value in points),
    )
    if at is None or after is None:
        when = "at the act" if at is None else "10 minutes after the act"
        return known.not_measured(f"the metric had no value {when}")
    verdict, reason = _verdict(known.better, comparison, at, after)
    return replace(known, verdict=verdict, reason=reason)


def _verdict(better: str | None, comparison: Comparison | None, at: float, after: float) -> tuple[EffectVerdict, str]:
    improvement = _improvement(better, at, after)
    held_at, held_after = (comparison.holds(at), comparison.holds(after)) if comparison else (None, None)
    if held_at is not None and held_after is not None:
        if held_at and not held_after:
            return EffectVerdict.HELPED, "the alert's condition held at the act and did not 10 minutes after"
        if improvement <= -LEAST_CHANGE or (held_after and not held_at):
            return EffectVerdict.WORSE, "the alert's condition held 10 minutes after, or the metric moved towards it"
        still = "still held 10 minutes after" if held_after else "did not hold at the act"
        return EffectVerdict.NO_CHANGE, f"the alert's condition {still}"
    if not (math.isfinite(at) and math.isfinite(after)):
        return EffectVerdict.NOT_MEASURED, "the metric was not a number, so the change is unknown"
    if better is None:
        return EffectVerdict.NOT_MEASURED, "neither the rule nor the playbook says which way is better"
    share = f"{LEAST_CHANGE:.0%} of the larger value"
    if improvement >= LEAST_CHANGE:
        return EffectVerdict.HELPED, f"it moved the better way by at least {share}"
    if improvement <= -LEAST_CHANGE:
        return EffectVerdict.WORSE, f"it moved the worse way by at least {share}"
    return EffectVerdict.NO_CHANGE, f"it moved by less than {share}"


def _improvement(better: str | None, at: float, after: float) -> float:
    """Return the change for the better as a share of the larger value, 0 if unknown."""
    scale = max(abs(at), abs(after))
    if better is None or not scale or not math.isfinite(scale):
        return 0.0
    return (at - after if better == "lower" else after - at) / scale


def _median(points: Sequence[tuple[float, float]], begin: float, end: float) -> float | None:
    values = [value for time, value in points if begin <= time <= end]
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else (values[-1] if values else None)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
