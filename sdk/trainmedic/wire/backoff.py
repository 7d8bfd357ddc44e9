"""How long to wait before the next try of something that has just failed.

The SDK, the node agent and the server all use it. Not here: the waiting itself.
"""

from __future__ import annotations

import random

# A training draws from the shared generator, and its results would not repeat if something else drew from it as well.
_GENERATOR = random.Random()  # noqa: S311


class Backoff:
    """Waits that grow by ``factor`` from ``first`` to ``longest`` seconds, until `reset`.

    With ``jitter`` a wait is anything from half its length on, so that thousands of jobs which lost the same
    server do not come back to it in the same moment.
    """

    def __init__(self, first: float, longest: float, factor: float = 2.0, jitter: bool = False) -> None:
        self._first = first
        self._longest = longest
        self._factor = factor
        self._jitter = jitter
        self._next = first

    def next(self) -> float:
        """Seconds to wait now; the wait after it will be longer."""
        wait = self._next
        self._next = min(wait * self._factor, self._longest)
        return wait * _GENERATOR.uniform(0.5, 1.0) if self._jitter else wait

    def reset(self) -> None:
        """Begin with the first wait again, because something has succeeded."""
        self._next = self._first
