"""How often an in-memory checkpoint is made, and which of them are kept.

A copy costs training the time that it waits for it. So it is made as often as it was asked for, but never so often
that it would cost more than its share of a step: the measured cost decides. What is kept is the newest, for a crash,
and others at growing distances behind it, for a rollback to before an alert began.

Nothing here depends on a framework, or on a clock: all ranks that count alike decide alike.
"""

from __future__ import annotations

import math
from typing import Sequence

HORIZON = 600.0
"""Seconds that the kept checkpoints are to reach back: an alert's way to its rollback takes some two minutes."""
FIRST_INTERVAL = 10
"""Steps between two copies until it is measured what one costs, where the user leaves the choice."""
_REPLICA_REST = 4  # times as long as a copy takes to another node, so that there is one whole at any time
_SHARE, _LARGE_SHARE, _FIXED = 0.0015, 0.008, 0.000_15


def budget_per_step(step_seconds: float, share: float | None = None) -> float:
    """Seconds of a step that copies may cost on average: 0.8 % of a step of 10 ms, 0.15 % of one of 100 ms.

    ``share`` of a step in their place, where the user has named one.
    """
    if share is not None:
        return step_seconds * share
    return max(_SHARE * step_seconds, min(_LARGE_SHARE * step_seconds, _FIXED))


class MemoryCadence:
    """The steps after which a copy is due: the multiples of ``interval``, at least ``every``.

    ``every`` None leaves the choice to the measured cost. ``replica_every`` is how many seconds there are to be between
    two copies to another node.
    """

    def __init__(self, every: int | None, share: float | None = None, replica_every: float | None = None) -> None:
        self.every = every or 1
        self.interval = every or FIRST_INTERVAL
        self.horizon = 0
        """Steps that the kept checkpoints are to reach back; 0 while it is not known how long a step takes."""
        self.replica_steps = 0
        """The checkpoints of these steps' multiples are copied to another node; 0 while it is not known how often."""
        self._replica_every = replica_every
        self._share = share

    def next_due(self, step: int) -> int:
        """The first step after that one at which a copy is due."""
        return (step // self.interval + 1) * self.interval

    def adapt(self, cost: float, step_seconds: float) -> bool:
        """Set the interval by what a copy costs, in seconds of training, and a step takes. Whether it has changed.

        A little more or less changes nothing, so that the steps at which copies are made stay the same.
        """
        self.horizon = math.ceil(HORIZON / step_seconds)
        fitting = math.ceil(cost / budget_per_step(step_seconds, self._share))
        interval = self.every * max(math.ceil(fitting / self.every), 1)
        if self.interval / 2 < interval <= self.interval:
            return False
        changed, self.interval = interval != self.interval, interval
        return changed

    def space_replicas(self, step_seconds: float, seconds: float) -> None:
        """Set the steps between two copies to another node, where one takes so many seconds to get there."""
        if self._replica_every is not None:
            period = max(self._replica_every, _REPLICA_REST * seconds)
            self.replica_steps = self.interval * math.ceil(period / (self.interval * step_seconds))


def dispensable(steps: Sequence[int], horizon: int) -> int:
    """Of the checkpoints of these steps, in ascending order, the one that is missed least. The newest stays.

    Those that are left reach back in distances that grow with their age, as far as ``horizon`` steps if there are
    enough of them; 0 is for any distance.
    """
    newest = steps[-1]
    if len(steps) < 3 or (horizon and newest - steps[0] > horizon):
        return steps[0]
    # How much further back one has to go where it is gone, in relation to how far that is.
    gaps = {
        steps[index]: (steps[index + 1] - steps[index - 1]) / (newest - steps[index - 1])
        for index in range(1, len(steps) - 1)
    }
    return min(gaps, key=lambda step: (gaps[step], -step))
