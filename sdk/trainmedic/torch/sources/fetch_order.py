"""Detection of loops that fetch a batch during the previous step."""

from __future__ import annotations

import re

_TAKEN, _BEGUN, _ENDED = "t", "b", "e"
# Prefetching: batches before the first step and others during it, but none between the first and second steps. Loops
# without prefetching take no batch before the first step, or another one before the second.
_AHEAD = re.compile("t+bt+eb")
_PERHAPS_AHEAD = re.compile("t+bt+e")  # after the first step; the second decides
_MOST_EVENTS = 10_000  # after more before the second step, the loop counts as not prefetching


class FetchOrder:
    """``is_ahead`` is known once it ``is_decided``, at the second step."""

    __slots__ = ("_events", "is_ahead", "is_decided")

    def __init__(self) -> None:
        self.is_ahead = False
        self.is_decided = False
        self._events: list[str] = []

    @property
    def may_be_ahead(self) -> bool:
        """True if undecided after the first step."""
        return not self.is_decided and _PERHAPS_AHEAD.fullmatch("".join(self._events)) is not None

    def batch_was_taken(self) -> None:
        self._record(_TAKEN)

    def step_began(self) -> None:
        self._record(_BEGUN)
        if self._events.count(_BEGUN) == 2:
            self.is_decided = True
            self.is_ahead = _AHEAD.fullmatch("".join(self._events)) is not None

    def step_ended(self) -> None:
        self._record(_ENDED)

    def _record(self, event: str) -> None:
        self._events.append(event)
        self.is_decided = self.is_decided or len(self._events) > _MOST_EVENTS
