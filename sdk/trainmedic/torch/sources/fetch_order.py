"""Whether a loop takes its batches ahead: each during the step before the one that it is for.

Such a loop holds a batch while a rollback is carried out, and trains on it afterwards, which no source of batches can
prevent. Who calls it: the loop over the batches, each step, and ``restore``, which tells of it.
"""

from __future__ import annotations

import re

_TAKEN, _BEGUN, _ENDED = "t", "b", "e"
# A batch before the first step and others during it, but none between the first step and the second. A loop that takes
# all batches of a step within it takes none before the first, and one that takes the first of them before takes another
# before the second.
_AHEAD = re.compile("t+bt+eb")
_PERHAPS_AHEAD = re.compile("t+bt+e")  # after the first step, of which the second will tell
_LONGEST = 10_000  # events; a first step of more batches is not looked at to its end


class FetchOrder:
    """The order in which the first two steps of a process and the batches for them come."""

    __slots__ = ("_events", "is_ahead", "is_decided")

    def __init__(self) -> None:
        self.is_ahead = False
        self.is_decided = False
        self._events: list[str] = []

    @property
    def may_be_ahead(self) -> bool:
        """Whether it cannot be told yet, after the first step."""
        return not self.is_decided and _PERHAPS_AHEAD.fullmatch("".join(self._events)) is not None

    def batch_was_taken(self) -> None:
        self._note(_TAKEN)

    def step_began(self) -> None:
        self._note(_BEGUN)
        if self._events.count(_BEGUN) == 2:
            self.is_decided = True
            self.is_ahead = _AHEAD.fullmatch("".join(self._events)) is not None

    def step_ended(self) -> None:
        self._note(_ENDED)

    def _note(self, event: str) -> None:
        self._events.append(event)
        self.is_decided = self.is_decided or len(self._events) > _LONGEST
