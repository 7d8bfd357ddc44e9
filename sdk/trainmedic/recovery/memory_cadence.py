"""Frequency of in-memory checkpoints, limited by cost, and which are kept.

Equal inputs give equal results on all ranks.
"""

from __future__ import annotations

import math
from typing import Sequence

HORIZON = 600.0  # seconds that checkpoints reach back; an alert's rollback takes about two minutes
FIRST_INTERVAL = 10  # steps between copies until their cost is known
# Least period of copies to another node, in durations of such a copy, so that one is always complete.
_REPLICA_PERIOD = 4
# Copies may cost `_SHARE` of a step; of a short one `_LARGE_SHARE`, but at most `_MOST_BY_LARGE_SHARE` seconds.
_SHARE, _LARGE_SHARE, _MOST_BY_LARGE_SHARE = 0.0015, 0.008, 0.000_15


def budget_per_step(step_seconds: float, share: float | None = None) -> float:
    """Return the seconds of a step that copies may cost: ``share`` of it, or 0.8 % of 10 ms, 0.15 % of 100 ms."""
    if share is not None:
        return step_seconds * share
    return max(_SHARE * step_seconds, min(_LARGE_SHARE * step_seconds, _MOST_BY_LARGE_SHARE))


class MemoryCadence:
    """Steps of copies: multiples of ``interval``, at least ``every`` (None: by cost).

    ``replica_every``: seconds between copies to another node.
    """

    def __init__(self, every: int | None, share: float | None = None, replica_every: float | None = None) -> None:
        self.every = every or 1
        self.interval = every or FIRST_INTERVAL
        self.horizon = 0  # steps that checkpoints reach back; 0 while unknown
        self.replica_steps = 0  # multiples of this are copied to another node; 0 while unknown
        self._replica_every = replica_every
        self._share = share

    def next_due(self, step: int) -> int:
        return (step // self.interval + 1) * self.interval

    def adapt(self, cost: float, step_seconds: float) -> bool:
        """Set the interval from the seconds of a copy and a step, unless it would shrink by less than half.

        Return whether it changed.
        """
        self.horizon = math.ceil(HORIZON / step_seconds)
        fitting = math.ceil(cost / budget_per_step(step_seconds, self._share))
        interval = self.every * max(math.ceil(fitting / self.every), 1)
        if self.interval / 2 < interval <= self.interval:
            return False
        changed, self.interval = interval != self.interval, interval
        return changed

    def space_replicas(self, step_seconds: float, seconds: float) -> None:
        """Set the steps between copies to another node, of ``seconds`` each."""
        if self._replica_every is not None:
            period = max(self._replica_every, _REPLICA_PERIOD * seconds)
            self.replica_steps = self.interval * math.ceil(period / (self.interval * step_seconds))


def dispensable(steps: Sequence[int], horizon: int) -> int:
    """Return the most dispensable of two or more ascending steps, never the newest.

    The others reach back at growing distances.
    """
    newest = steps[-1]
    if len(steps) < 3 or (horizon and newest - steps[0] > horizon):
        return steps[0]
    # Growth of the way back if this one is deleted, relative to that way.
    gaps = {
        steps[index]: (steps[index + 1] - steps[index - 1]) / (newest - steps[index - 1])
        for index in range(1, len(steps) - 1)
    }
    return min(gaps, key=lambda step: (gaps[step], -step))
