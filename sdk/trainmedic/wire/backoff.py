from __future__ import annotations

import random

# Not the shared generator: a training draws from it, and its results would not repeat.
_GENERATOR = random.Random()  # noqa: S311


class Backoff:
    """Waits that grow by ``factor`` from ``first`` to ``longest`` seconds.

    ``jitter`` makes each between half and its whole length, to spread reconnects.
    """

    def __init__(self, first: float, longest: float, factor: float = 2.0, jitter: bool = False) -> None:
        self._first = first
        self._longest = longest
        self._factor = factor
        self._jitter = jitter
        self._next = first

    def next(self) -> float:
        wait = self._next
        self._next = min(wait * self._factor, self._longest)
        return wait * _GENERATOR.uniform(0.5, 1.0) if self._jitter else wait

    def reset(self) -> None:
        self._next = self._first
