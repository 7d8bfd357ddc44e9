"""Interval of in-memory checkpoints by the cost on the slowest rank."""

from __future__ import annotations

import logging
import statistics
from collections import deque

from trainmedic.errors import NotAgreed
from trainmedic.job.group import Ranks
from trainmedic.recovery.memory_cadence import MemoryCadence

log = logging.getLogger("trainmedic")

_COSTS = 5  # copies in the median
_AGREE_EVERY = 20.0  # seconds between two agreements of the ranks
_PATIENCE = 60.0  # seconds that ranks wait for each other


class MemoryPace:
    def __init__(self, ranks: Ranks, cadence: MemoryCadence) -> None:
        self.is_over = False  # True if some rank can no longer make copies
        self.replica_seconds = 0.0  # time to fetch another node's copy
        self._ranks = ranks
        self._cadence = cadence
        self._costs: deque[float] = deque(maxlen=_COSTS)
        self._next_agreement = 0  # step

    def record(self, seconds: float) -> None:
        self._costs.append(seconds)

    def reset_agreement(self) -> None:
        # A rollback decreases the step, so the ranks would wait too long to agree.
        self._next_agreement = 0

    def adapt(self, step: int, step_seconds: float | None, works: bool) -> None:
        """Adapt the interval. Every rank calls it at the same steps."""
        cost = statistics.median(self._costs) if self._costs else None
        if self._ranks.world_size == 1:
            self.is_over = not works
        elif step < self._next_agreement:
            return
        else:
            cost, step_seconds = self._agree(cost, step_seconds, works)
            steps = round(_AGREE_EVERY / step_seconds) if cost and step_seconds else 0
            self._next_agreement = step + steps
        if cost is None or not step_seconds:
            return
        if self._cadence.adapt(cost, step_seconds):
            interval, milliseconds = self._cadence.interval, cost * 1e3
            log.info(
                "%s: an in-memory checkpoint every %d steps: it costs %.1f ms", self._ranks.job, interval, milliseconds
            )
        self._cadence.space_replicas(step_seconds, self.replica_seconds)

    def _agree(self, cost: float | None, step_seconds: float | None, works: bool) -> tuple[float | None, float | None]:
        """Return all ranks' largest figures, None if one has none."""
        mine = {"cost": cost, "step": step_seconds, "works": works, "replica": self.replica_seconds}
        try:
            figures = self._ranks.group("memory-pace").poll(mine, _PATIENCE)
        except NotAgreed as error:
            log.warning("%s: no more in-memory checkpoints: %s", self._ranks.job, error)
            figures = {}
        self.is_over = len(figures) < self._ranks.world_size or not all(figure["works"] for figure in figures.values())
        if self.is_over:
            log.warning("%s: no more in-memory checkpoints: not all ranks can make them", self._ranks.job)
            return None, None
        costs, steps = ([figure[name] for figure in figures.values()] for name in ("cost", "step"))
        self.replica_seconds = max(figure["replica"] for figure in figures.values())
        return _largest(costs), _largest(steps)


def _largest(figures: list[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return max(known) if len(known) == len(figures) else None
