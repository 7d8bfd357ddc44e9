"""Fingerprints of drawn batches, to check a rollback's replay.

Call `BatchLog.forget` after a change of the batches.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any, Collection, Mapping, NamedTuple, Sequence

from trainmedic.recovery.fingerprints import Fingerprint, read

MOST_COMPARED = 16  # batches after a rollback
_LONGEST = 65_536  # most batches remembered
FORMAT = 2  # of fingerprints; others are not comparable
# Batches to collect before hashing them: many at once are cheaper, because a step leaves the CPU caches cold.
_MOST_UNREAD = 32
_MOST_UNREAD_ON_DEVICE = 1024
_MOST_SAVED = 512  # batches in a checkpoint, for a restart


_EARLIER_PROCESS = "these batches were drawn by an earlier process"
NOT_COMPARABLE = "nothing of these batches can be compared"
NOT_DRAWN = "none of the present batches was drawn before"
RANDOM = "after a skip the training's random numbers differ, and so do the batches made with them"


class _Drawn(NamedTuple):
    value: Fingerprint
    epoch: int
    is_random: bool  # the training's random numbers made the batch


class BatchComparison:
    """Batches after a rollback: ``expected`` ones, and skipped ones (``left_out``)."""

    def __init__(
        self, expected: Sequence[Fingerprint], left_out: Sequence[Fingerprint], epoch: int, why_none: str
    ) -> None:
        self._expected = list(expected)
        self._left_out = list(left_out)
        self._epoch = epoch  # of the skip; skipped batches may come again in other epochs
        self._why_none = why_none  # why nothing is expected
        self._drawn: list[_Drawn] = []
        self._has_random_order = False  # True if random numbers may have ordered the epoch, begun after the rollback

    @property
    def is_skip(self) -> bool:
        """True if batches were skipped, so that the next have other random numbers."""
        return bool(self._left_out)

    @property
    def is_complete(self) -> bool:
        return len(self._drawn) >= self._most_compared

    @property
    def _most_compared(self) -> int:
        # Batches beyond the known ones are compared too: they must not be among the skipped ones.
        return MOST_COMPARED if self._left_out else len(self._expected)

    def add(self, drawn: _Drawn) -> None:
        if self._drawn and self._drawn[-1].epoch != drawn.epoch:
            self._has_random_order = drawn.is_random  # an epoch's first random numbers may have ordered all of it
        self._drawn.append(drawn._replace(is_random=drawn.is_random or self._has_random_order))

    def result(self, ended_because: str = "") -> dict[str, Any]:
        """Return ``verified.batches``. Waits for the batches' device."""
        left_out = {value for value in map(read, self._left_out) if value is not None}
        # Batches that repeat by themselves, as over epochs, do not show that a skipped one was drawn.
        if len(left_out) < len(self._left_out):
            left_out = set()
        verdicts = [self._agrees(number, left_out) for number in range(len(self._drawn))]
        compared = sum(verdict is not None for verdict in verdicts)
        why = self._why_incomplete(ended_because) or ("" if compared else self._why_not_compared())
        result: dict[str, Any] = {"compared": compared, "agreed": verdicts.count(True)}
        return {**result, "why": why} if why else result

    def _why_incomplete(self, ended_because: str) -> str:
        if not self._most_compared:
            return self._why_none
        return "" if self.is_complete else ended_because

    def _why_not_compared(self) -> str:
        if any(batch.is_random for batch, _ in zip(self._drawn, self._expected, strict=False)):
            return RANDOM
        return NOT_COMPARABLE if self._expected else NOT_DRAWN

    def _agrees(self, number: int, left_out: Collection[int]) -> bool | None:
        """Return whether a batch is the expected one; None if unknown."""
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
        self.drawn = 0  # without those that a rollback revoked
        self.comparison = BatchComparison((), (), 0, "")
        self._compares = False  # the comparison needs further batches
        self._fingerprints: deque[Fingerprint] = deque(maxlen=_LONGEST)
        self._unread = 0  # last fingerprints that are not computed yet
        self._why_begins = _EARLIER_PROCESS  # why batches before the first fingerprint are unknown

    def add(self, batch: Fingerprint, epoch: int, is_random: bool = False) -> None:
        """``is_random``: the training's random numbers made the batch."""
        self.drawn += 1
        self._fingerprints.append(batch)
        self._unread += 1
        if self._unread > _MOST_UNREAD and (getattr(batch, "is_here", True) or self._unread > _MOST_UNREAD_ON_DEVICE):
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
        self._why_begins = because

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
        """Return the batches after ``drawn``, or why they are unknown."""
        first = self.drawn - len(self._fingerprints)
        if drawn is None:
            return [], "the checkpoint does not say how many batches had been drawn"
        if drawn < first:
            return [], self._why_begins if len(self._fingerprints) < _LONGEST else "too many were drawn since"
        return list(islice(self._fingerprints, drawn - first, None)), ""

    def state(self) -> dict[str, Any]:
        """Return JSON values, after waiting for the batches' device."""
        self.read()
        # From the end, so that a long log is not traversed.
        last = list(islice(reversed(self._fingerprints), _MOST_SAVED))[::-1]
        known = {"fingerprints": last, "begins_because": self._why_begins}
        return {"drawn": self.drawn, "format": FORMAT, **known}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        self.forget(_EARLIER_PROCESS)
        self.drawn = 0 if state is None else int(state["drawn"])
        if state is None:
            return
        if state.get("format") != FORMAT:  # of another release: not comparable
            return
        self._fingerprints.extend(state["fingerprints"])
        self._why_begins = str(state["begins_because"])
