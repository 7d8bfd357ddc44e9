"""The batches that a training has drawn, by their fingerprints, and whether those after a rollback are the same.

An integration uses it so::

    log = BatchLog()
    log.add(fingerprint(batch), epoch)                      # each batch, as it is drawn
    {..., "drawn": log.drawn}                               # into each checkpoint
    comparison = log.go_back(kept["drawn"], epoch, skip)    # at a rollback
    comparison.told()                                       # when it is complete: the answer's ``verified.batches``

From `BatchLog.go_back` on `BatchLog.add` compares. Where a command changes what batches there are, such as their size,
`BatchLog.forget` says so. Not here: fingerprints themselves (``fingerprints``), and when the command is answered.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any, Collection, Mapping, NamedTuple, Sequence

from trainmedic.recovery.fingerprints import Fingerprint, read

MOST_COMPARED = 16
"""Batches after a rollback: if these are the same, those that follow are."""
_LONGEST = 65_536  # batches that are remembered
FORMAT = 2
"""Of fingerprints in a checkpoint: what other releases have made of a batch says nothing about ours."""
_MOST_UNREAD = 32  # batches after which fingerprints are worked out
_MOST_AWAY = 1024  # the same where their samples are on a device
_CARRIED = 512  # batches that a checkpoint remembers for a restart


NOT_COMPARABLE = "nothing of these batches can be compared"
NOT_DRAWN = "none of the batches that come now was drawn before"
RANDOM = "after a skip the training's random numbers are others, and with them the batches, which are made of them"


class _Drawn(NamedTuple):
    """A batch that came after a rollback."""

    value: Fingerprint
    epoch: int
    is_random: bool


class BatchComparison:
    """Batches that are compared with those that were drawn in their place before."""

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
        """Whether batches were left out, so that those that come meet the random numbers of earlier ones."""
        return bool(self._left_out)

    @property
    def is_complete(self) -> bool:
        """Whether all has been drawn that is to be compared; at once where nothing can be."""
        return len(self._drawn) >= self._wanted

    @property
    def _wanted(self) -> int:
        # Beyond those whose like was drawn before, it is seen that they are not those that were to be left out.
        return MOST_COMPARED if self._left_out else len(self._expected)

    def add(self, drawn: _Drawn) -> None:
        """Take note of the next batch, while it is not complete."""
        self._drawn.append(drawn)

    def told(self, ended_because: str = "") -> dict[str, Any]:
        """The member ``batches`` of ``verified``: how many were compared, and how many of these agreed.

        ``ended_because`` says why there were no more, where it is not complete. It waits for the device of the batches.
        """
        left_out = {value for value in map(read, self._left_out) if value is not None}
        # Where batches repeat by themselves, as over epochs, one that looks like one of those left out may be another.
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
        """Whether that batch is the one that was to come; None where it cannot be told."""
        batch = self._drawn[number]
        drawn, before = read(batch.value), read(self._expected[number]) if number < len(self._expected) else None
        if drawn is None:
            return None
        if drawn == before:
            return True
        if drawn in left_out and batch.epoch == self._epoch:
            return False
        if self.is_skip and batch.is_random:
            # After a skip the random numbers that it is made with are others, and so it looks like no batch before.
            return None
        if before is not None:
            return False
        return True if left_out and batch.epoch == self._epoch else None


class BatchLog:
    """The batches of a training's course, in order. For its training thread."""

    def __init__(self) -> None:
        self.drawn = 0
        """How many batches the training has drawn, on the course that it is on."""
        self.comparison = BatchComparison((), (), 0, "")
        """The last one that `go_back` began."""
        self._compares = False
        self._fingerprints: deque[Fingerprint] = deque(maxlen=_LONGEST)
        self._unread = 0
        self._begins_because = "these batches were drawn by an earlier process"

    def add(self, batch: Fingerprint, epoch: int, is_random: bool = False) -> None:
        """A batch of that epoch was drawn; with ``is_random``, it was made with the training's random numbers."""
        self.drawn += 1
        self._fingerprints.append(batch)
        self._unread += 1
        if self._unread > _MOST_UNREAD and (getattr(batch, "is_here", True) or self._unread > _MOST_AWAY):
            self.read()
        if self._compares:
            self.comparison.add(_Drawn(batch, epoch, is_random))
            self._compares = not self.comparison.is_complete

    def read(self) -> None:
        """Work out the fingerprints of the last batches. It waits for the device that holds them, as writing a
        checkpoint does anyhow."""
        if self._unread:  # these are at the end, and perhaps others before them
            unread = [self._fingerprints.pop() for _ in range(min(self._unread, len(self._fingerprints)))]
            self._fingerprints.extend(map(read, reversed(unread)))
            self._unread = 0

    def forget(self, because: str) -> None:
        """From here on other batches come than did before, for which `because` gives the reason."""
        self._fingerprints.clear()
        self._unread = 0
        self._begins_because = because

    def go_back(self, drawn: int | None, epoch: int, skip: int = 0, why_not: str = "") -> BatchComparison:
        """Training goes back to where so many batches had been drawn, in that epoch, and leaves out the next ``skip``.

        ``drawn`` is None where the checkpoint does not say it. ``why_not`` says why other batches than before are to be
        expected, if they are.
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
        """The fingerprints from there on, and why there are none if there are not."""
        first = self.drawn - len(self._fingerprints)
        if drawn is None:
            return [], "the checkpoint does not say how many batches had been drawn"
        if drawn < first:
            return [], self._begins_because if len(self._fingerprints) < _LONGEST else "too many were drawn since"
        return list(islice(self._fingerprints, drawn - first, None)), ""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, for `restore` after a restart; plain JSON values. It waits for the device."""
        self.read()
        kept = list(islice(reversed(self._fingerprints), _CARRIED))[::-1]  # those before are not gone through
        known = {"fingerprints": kept, "begins_because": self._begins_because}
        return {"drawn": self.drawn, "format": FORMAT, **known}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on after a restart from where `state` was taken; None where the checkpoint does not hold it."""
        self.forget("these batches were drawn by an earlier process")
        self.drawn = 0 if state is None else int(state["drawn"])
        if state is None:
            return
        if state.get("format") != FORMAT:  # those of another release cannot be compared with ours
            return
        self._fingerprints.extend(state["fingerprints"])
        self._begins_because = str(state["begins_because"])
