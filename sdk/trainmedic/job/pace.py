"""Duration of steps: data (waiting for a batch), wait (for other ranks), and compute (the rest).

Own time excludes wait; the rank that delays others has the most.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any, NamedTuple

from trainmedic.job.reported_values import finite

_MOST_INTERVALS = 101  # odd, so that the median is one of them; as long as half are fast, it is fast
_RECENT = 20  # intervals for the parts of a step
_WEIGHT = 0.2  # of the newest interval in the mean for the throughput


class Interval(NamedTuple):
    seconds: float
    steps: int
    samples: Any = None
    tokens: Any = None
    own_seconds: Any = None  # all but `wait_seconds`; one of both suffices
    data_seconds: Any = None
    wait_seconds: Any = None


class StepParts(NamedTuple):
    own: float | None
    data: float | None
    compute: float | None
    wait: float | None


class Pace:
    """Last intervals between reports. Any thread may read."""

    __slots__ = ("_intervals",)

    def __init__(self) -> None:
        self._intervals: deque[Interval] = deque(maxlen=_MOST_INTERVALS)

    def add(self, interval: Interval) -> None:
        self._intervals.append(interval)

    def usual_seconds(self, least: int) -> float | None:
        """Return the median interval; None for fewer than `least`."""
        intervals = list(self._intervals)
        return statistics.median(interval.seconds for interval in intervals) if len(intervals) >= least else None

    def median_step_seconds(self) -> float | None:
        intervals = list(self._intervals)
        return statistics.median(each.seconds / each.steps for each in intervals) if intervals else None

    def parts(self) -> StepParts:
        parts = [_parts_of(interval) for interval in list(self._intervals)[-_RECENT:]]
        return StepParts(*(_median(values) for values in zip(*parts, strict=True))) if parts else _UNKNOWN

    def values(self, waited: float) -> dict[str, float]:
        """Return step time and throughput. ``waited``: seconds since the last report."""
        seconds = steps = 0.0
        amounts = {"samples": 0.0, "tokens": 0.0}
        for interval in list(self._intervals):
            weight = _WEIGHT if seconds else 1.0
            seconds += weight * (interval.seconds - seconds)
            steps += weight * (interval.steps - steps)
            for name, amount in amounts.items():
                count = finite(getattr(interval, name))
                if count is not None:
                    amounts[name] = amount + weight * (count - amount)
        if not seconds:
            return {}
        lasting = max(seconds, waited)  # a hanging loop must not look fast
        throughput = {f"training_throughput_{name}_per_second": amount / lasting for name, amount in amounts.items()}
        return {"training_step_seconds": lasting / steps, **{name: rate for name, rate in throughput.items() if rate}}


_UNKNOWN = StepParts(None, None, None, None)


def _parts_of(interval: Interval) -> StepParts:
    data, wait, own = map(finite, (interval.data_seconds, interval.wait_seconds, interval.own_seconds))
    if own is None and wait is not None:
        own = max(interval.seconds - wait, 0.0)
    elif wait is None and own is not None:
        wait = max(interval.seconds - own, 0.0)
    compute = max(own - data, 0.0) if own is not None and data is not None else None
    return StepParts(*(None if part is None else part / interval.steps for part in (own, data, compute, wait)))


def _median(values: tuple[float | None, ...]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
