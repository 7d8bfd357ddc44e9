"""Fingerprints of drawn batches, to check a rollback's replay.

Call `BatchLog.forget` after a change of the batches.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any, Collection, Mapping, NamedTuple, Sequence

from trainmedic.recovery.fingerprints import Fingerprint, read

MOST_COMPARED = 16
"""Batches to compare after a rollback."""
_LONGEST = 65_536  # most batches remembered
FORMAT = 2
"""Version; others are not comparable."""
_MOST_UNREAD = 32  # batches to collect before computing their fingerprints
_MOST_AWAY = 1024  # the same for samples on a device
_CARRIED = 512  # most batches that a checkpoint remembers for a restart


NOT_COMPARABLE = "nothing of these batches can be compared"
NOT_DRAWN = "none of the present batches was drawn before"
RANDOM = "after a skip the training's random numbers differ, and so do the batches made with them"


class _Drawn(NamedTuple):
    value: Fingerprint
    epoch: int
    is_random: bool


class BatchComparison:
    def __init__(
        self, expected: Sequence[Fingerprint], left_out: Sequence[Fingerprint], epoch: int, why_none: str
    ) -> None:
        self._expected = list(expected)
        self._left_out = list(left_out)
        self._epoch = epoch
        self._why_none = why_none
        self._drawn: list[_Drawn] = []

    @property
    def is_skip(self) -> bool:
        """Return whether batches were skipped, so that the next meet other random numbers."""
        return bool(self._left_out)

    @property
    def is_complete(self) -> bool:
        return len(self._drawn) >= self._wanted

    @property
    def _wanted(self) -> int:
        # Batches beyond the known ones are compared too: they must not be among the skipped ones.
        return MOST_COMPARED if self._left_out else len(self._expected)

    def add(self, drawn: _Drawn) -> None:
        self._drawn.append(drawn)

    def told(self, ended_because: str = "") -> dict[str, Any]:
        """Return ``verified.batches``. Waits for the batches' device."""
        left_out = {value for value in map(read, self._left_out) if value is not None}
        # Batches that repeat by themselves, as over epochs, do not show that a skipped one was drawn.
        is_telling = 0 < len(left_out) == len(self._left_out)
        verdicts = [self._agrees(number, left_out if is_telling else set()) for number in range(len(self._drawn))]
        compared = sum(verdict is not None for verdict in verdicts)
        told: dict[str, Any] = {"compared": compared, "agreed": verdicts.count(True)}
        why = self._why_none if not self._wanted else "" if self.is_complete else ended_because
        if not why and not compared:
            is_random = any(batch.is_random for batch, _ in zip(self._drawn, self._expected, strict=False))
            why = RANDOM if is_random else NOT_COMPARABLE if self._expected else NOT_DRAWN
        if why:
            told["why"] = why
        return told

    def _agrees(self, number: int, left_out: Collection[int]) -> bool | None:
        """Return None if unknown."""
        batch = self._drawn[number]
        drawn, before = read(batch.value), read(self._expected[number]) if number < len(self._expected) else None
        if drawn is None:
            return None
        if drawn == before:
            return True
        if drawn in left_out and batch.epoch == self._epoch:
            return False
        if self.is_skip and batch.is_random:
            # The batch was made with other random numbers after the skip, so no fingerprint can match.
            return None
        if before is not None:
            return False
        return True if left_out and batch.epoch == self._epoch else None


class BatchLog:
    """Drawn batches, in order. Training thread only."""

    def __init__(self) -> None:
        self.drawn = 0
        """Excludes revoked batches."""
        self.comparison = BatchComparison((), (), 0, "")
        self._compares = False
        self._fingerprints: deque[Fingerprint] = deque(maxlen=_LONGEST)
        self._unread = 0
        self._begins_because = "these batches were drawn by an earlier process"

    def add(self, batch: Fingerprint, epoch: int, is_random: bool = False) -> None:
        """``is_random``: random numbers of the training made it."""
        self.drawn += 1
        self._fingerprints.append(batch)
        self._unread += 1
        if self._unread > _MOST_UNREAD and (getattr(batch, "is_here", True) or self._unread > _MOST_AWAY):
            self.read()
        if self._compares:
            self.comparison.add(_Drawn(batch, epoch, is_random))
            self._compares = not self.comparison.is_complete

    def read(self) -> None:
        if self._unread:  # the unread ones are last
            unread = [self._fingerprints.pop() for _ in range(min(self._unread, len(self._fingerprints)))]
            self._fingerprints.extend(map(read, reversed(unread)))
            self._unread = 0

    def forget(self, because: str) -> None:
        self._fingerprints.clear()
        self._unread = 0
        self._begins_because = because

    def go_back(self, drawn: int | None, epoch: int, skip: int = 0, why_not: str = "") -> BatchComparison:
        """Return to the position after ``drawn`` batches (None: unknown), and skip ``skip``.

        ``why_not``: reason to expect different batches.
        """
        since, why = self._since(drawn)
        if drawn is not None:
            for _ in range(min(max(self.drawn - drawn, 0), len(self._fingerprints))):
                self._fingerprints.pop()
            self.drawn = drawn
        why = why_not or why or NOT_DRAWN
        if why_not:
            since = []
        self.comparison = BatchComparison(since[skip : skip + MOST_COMPARED], since[:skip], epoch, why)
        self._compares = not self.comparison.is_complete
        return self.comparison

    def _since(self, drawn: int | None) -> tuple[list[Fingerprint], str]:
        first = self.drawn - len(self._fingerprints)
        if drawn is None:
            return [], "the checkpoint does not say how many batches had been drawn"
        if drawn < first:
            return [], self._begins_because if len(self._fingerprints) < _LONGEST else "too many were drawn since"
        return list(islice(self._fingerprints, drawn - first, None)), ""

    def state(self) -> dict[str, Any]:
        """Return JSON values, after waiting for the batches' device."""
        self.read()
        # From the end, so that a long log is not traversed.
        kept = list(islice(reversed(self._fingerprints), _CARRIED))[::-1]
        known = {"fingerprints": kept, "begins_because": self._begins_because}
        return {"drawn": self.drawn, "format": FORMAT, **known}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        self.forget("these batches were drawn by an earlier process")
        self.drawn = 0 if state is None else int(state["drawn"])
        if state is None:
            return
        if state.get("format") != FORMAT:  # of another release: not comparable
            return
        self._fingerprints.extend(state["fingerprints"])
        self._begins_because = str(state["begins_because"])
