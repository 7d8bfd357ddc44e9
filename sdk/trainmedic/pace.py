"""How often the ranks look for a decision: every so many calls of `trainmedic.Medic.commands`.

A fixed number, or by default as many as make about one second, so that neither steps of milliseconds
cost anything nor steps of minutes make a command wait. How many is part of each decision, and so the
same on all ranks. Who calls it: ``sharing``; the training thread notes, the background thread asks.
"""

from __future__ import annotations

APART = 1.0
"""Seconds between two looks, where no number of calls was given."""
AHEAD = 0.2
"""Rank 0 decides this many seconds before its own training thread is expected to ask."""
MOST = 10_000
_KEPT = 4


class Pace:
    """What the last few spans between two looks took."""

    def __init__(self, every: int | None = None) -> None:
        self._every = every
        self._recent: tuple[float, ...] = ()  # seconds per call; replaced whole, for the other thread
        self._span = 1

    def note(self, span: int, seconds: float) -> None:
        """`span` calls took `seconds`."""
        self._span = span
        self._recent = (*self._recent, max(seconds, 0.0) / span)[-_KEPT:]

    def next_span(self) -> int:
        """In how many calls to look again. Grows by doubling, so that one quick call does not mislead."""
        if self._every is not None:
            return self._every
        if not self._recent:
            return 1
        return max(1, min(int(APART / max(self._recent[-1], 1e-9)), 2 * self._span, MOST))

    def seconds(self, calls: int) -> float:
        """How long so many calls take at least."""
        return min(self._recent, default=0.0) * calls
