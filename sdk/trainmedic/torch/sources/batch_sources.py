"""Batch sources for sequences, iterables and iterators, with their interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Iterator

from torch.utils.data import DataLoader

from trainmedic.errors import Unsupported
from trainmedic.job.interrupt import fetch
from trainmedic.recovery.fingerprints import Fingerprint, fingerprint, read
from trainmedic.torch import randomness
from trainmedic.torch.sources.sample_order import Position, SkippedRanges

REPLAYED = "the same batches again"
NOT_REPLAYED = "not the same batches"
REREAD = 1000  # most batches to read again to reach a position without random access


class BatchSource:
    """Batches by epoch. ``position`` is the delivered part of the epoch, in batches by default.

    Positions in ``skipped`` are never delivered.
    """

    kind: str  # name in checkpoints, which must not change
    batch_size: int | None = None  # samples per batch; None if unknown or fixed
    workers: int | None = None  # worker processes; None if fixed

    def __init__(self) -> None:
        self.epoch = 0
        self.position: Position = 0
        self.skipped = SkippedRanges()

    @property
    def samples_per_batch(self) -> int | None:
        return self.batch_size

    def next(self) -> Any:
        """Return the next batch. StopIteration ends an epoch; the next call begins another."""
        while True:
            before = self.position
            try:
                batch = self.fetch()
            except StopIteration:
                self.skipped.end_epoch(self.epoch, before)
                self.epoch, self.position = self.epoch + 1, 0
                raise
            if not self.skipped.contains(self.epoch, before):
                return batch

    def fetch(self) -> Any:
        """Read one batch, skipped or not, and advance ``position``. Raises StopIteration."""
        raise StopIteration

    def state(self) -> dict[str, Any]:
        """Return `restore`'s input, with the keys of checkpoints."""
        return {
            "kind": self.kind,
            "epoch": self.epoch,
            "place": self.position,
            "left_out": [list(span) for span in self.skipped.ranges],
            "ends": [list(end) for end in self.skipped.ends.items()],
            "leaving_out": 0,  # earlier releases store the number of next batches to skip here
        }

    def restore(self, state: dict[str, Any]) -> str:
        """Go to `state`'s position and return the answer's text. Later skips stay."""
        self.epoch, self.position = state["epoch"], state["place"]
        ends = {**self.skipped.ends, **dict(state.get("ends", ()))}
        self.skipped = SkippedRanges([*self.skipped.ranges, *state["left_out"]])
        self.skipped.ends = ends
        self.skipped.add(self.epoch, self.position, self.position + state["leaving_out"])
        return REPLAYED

    def can_restore(self, state: dict[str, Any]) -> bool:
        return state.get("kind") in (None, self.kind)

    def start_epoch(self, epoch: int) -> str:
        """Go to an epoch's start, because another source's position is meaningless."""
        self.stop_loading()
        self.epoch, self.position = epoch, 0
        self.skipped = SkippedRanges()
        return f"{NOT_REPLAYED}: the checkpoint was written with a loader of another kind; its epoch begins anew"

    def check_skip(self, batches: int) -> None:
        """Raise Rejected if this many batches cannot be skipped."""

    def skip(self, batches: int) -> int:
        """Skip batches; return how many are newly skipped."""
        already = self.skipped.count(self.epoch, self.position, batches)
        self.skipped.add(self.epoch, self.position, self.position + batches)
        return batches - already

    def stop_loading(self) -> None:
        """Drop batches being loaded, before a new start."""

    def set_workers(self, count: int) -> None:
        raise Unsupported("only the workers of a plain DataLoader over an indexed data set can be changed")

    def set_batch_size(self, size: int) -> None:
        raise Unsupported("only the batch size of a plain DataLoader over an indexed data set can be changed")


class SequenceSource(BatchSource):
    """Batches ``source[0]``, ``source[1]``; a length or IndexError ends an epoch."""

    kind = "Numbered"

    def __init__(self, source: Any) -> None:
        super().__init__()
        self._source = source

    def fetch(self) -> Any:
        if hasattr(self._source, "__len__") and self.position >= len(self._source):
            raise StopIteration
        try:
            batch = self._source[self.position]
        except IndexError:
            raise StopIteration from None
        self.position += 1
        return batch


class IteratedSource(BatchSource, ABC):
    def __init__(self, source: Any) -> None:
        super().__init__()
        self._source = source
        self._iterator: Iterator[Any] | None = None

    def fetch(self) -> Any:
        if self._iterator is None:
            self._iterator = self.begin_epoch()
        try:
            batch = fetch(self._iterator)
        except StopIteration:
            self._iterator = None
            raise
        self.position += 1
        return batch

    def stop_loading(self) -> None:
        # A loader with persistent workers, perhaps within the source, would use its iterator again.
        for loader in (self._source, *getattr(self._source, "__dict__", {}).values()):
            if isinstance(loader, DataLoader) and loader.persistent_workers and loader._iterator is self._iterator:
                loader._iterator = None
        shut_down_workers(self._iterator)
        self._iterator = None

    @abstractmethod
    def begin_epoch(self) -> Iterator[Any]:
        """Return the iterator of the present epoch."""


class RereadSource(IteratedSource):
    """Batches of an iterable, read again with the same random numbers to go back."""

    kind = "Reread"

    def __init__(self, source: Any, most_reread: int) -> None:
        super().__init__(source)
        self._most_reread = most_reread
        self._random_at_start: dict[str, Any] | None = None  # of the epoch
        # Of the present epoch, to check that a second reading returns the same batches.
        self._fingerprints: list[Fingerprint] = []

    def fetch(self) -> Any:
        batch = super().fetch()
        if len(self._fingerprints) < min(self.position, self._most_reread):
            self._fingerprints.append(fingerprint(batch))
        return batch

    def state(self) -> dict[str, Any]:
        if self._iterator is not None:
            return {**super().state(), "at_start": self._random_at_start, "generator": None}
        return {**super().state(), "at_start": None, "generator": self._generator_state()}

    def restore(self, state: dict[str, Any]) -> str:
        position = state["place"]
        if position > self._most_reread:
            too_many = f"for more than {self._most_reread} would have to be read again"
            if (self.epoch, self.position) >= (state["epoch"], position):
                return f"{NOT_REPLAYED}: it goes on, {too_many}"
            super().restore(state)  # another process wrote it; no iterator can continue here
            self.position = 0
            return f"{NOT_REPLAYED}: the epoch begins anew, {too_many}"
        expected = self._fingerprints if self.epoch == state["epoch"] else []
        super().restore(state)
        self.stop_loading()
        self._fingerprints = []
        random_at_start = state["at_start"]
        if random_at_start is None:  # between epochs or before the first
            self._set_generator(state.get("generator"))
            return REPLAYED
        randomness.restore(random_at_start["random"])
        self._set_generator(random_at_start["generator"])
        self._iterator = self.begin_epoch()
        for batches in range(position):
            try:
                self._fingerprints.append(fingerprint(next(self._iterator)))
            except StopIteration:
                self._iterator = None
                return f"{NOT_REPLAYED}: the source has only {batches} batches this time"
        if any(read(before) != read(again) for before, again in zip(expected, self._fingerprints, strict=False)):
            return f"{NOT_REPLAYED}: the source gives others when it is read again"
        return replayed_after_rereading(position)

    def begin_epoch(self) -> Iterator[Any]:
        if self.position == 0:
            self._fingerprints = []
        self._random_at_start = {"random": randomness.capture(), "generator": self._generator_state()}
        for part in (self._source, getattr(self._source, "dataset", None)):
            set_epoch(part, self.epoch)
        return iter(self._source)

    def _generator_state(self) -> Any:
        generator = getattr(self._source, "generator", None)
        return generator.get_state() if generator is not None else None

    def _set_generator(self, state: Any) -> None:
        generator = getattr(self._source, "generator", None)
        if generator is not None and state is not None:
            generator.set_state(state)


_LOOKED_AT = 4  # first batches of an iterator, to see whether it draws the training's random numbers


class ForwardSource(BatchSource):
    """Sources that cannot go back by themselves, with one epoch."""

    goes_back = False  # True if this one can after all
    uses_random = False  # True if it draws from the training's random generators, which a rollback restores

    def __init__(self) -> None:
        super().__init__()
        self._lost = 0  # batches between a rollback's checkpoint and the rollback, which cannot be read again

    def restore(self, state: dict[str, Any]) -> str:
        self._lost = max(self.position - state["place"], 0)
        if self.position < state["place"]:  # of an earlier process
            return f"{NOT_REPLAYED}: this process has its own stream, which begins where the loop began it"
        return f"{NOT_REPLAYED}: a stream only goes on; {self._lost} batches since then are left out"

    def skip(self, batches: int) -> int:
        """Skip batches after the checkpoint; lost ones count."""
        return super().skip(max(batches - self._lost, 0))


class IteratorSource(ForwardSource):
    kind = "Stream"

    def __init__(self, source: Iterator[Any]) -> None:
        super().__init__()
        self._source = source
        self._fetched = 0

    def fetch(self) -> Any:
        # The first batch may begin an epoch, which draws a seed.
        is_looked_at = 0 < self._fetched < _LOOKED_AT and not self.uses_random
        before = randomness.capture() if is_looked_at else None
        batch = fetch(self._source)
        if before is not None:
            self.uses_random = randomness.has_moved(before)
        self._fetched += 1
        self.position += 1
        return batch


def replayed_after_rereading(batches: int) -> str:
    return f"{REPLAYED}, if the source repeats itself: {batches} were read again"


def set_epoch(part: Any, epoch: int) -> None:
    if hasattr(part, "set_epoch"):
        part.set_epoch(epoch)
    elif hasattr(part, "next_epoch"):
        part.next_epoch = epoch  # MosaicML's data sets count by themselves and do not go back
    for stage in getattr(part, "pipeline", ()):  # WebDataset
        if isinstance(getattr(stage, "epoch", None), int):
            stage.epoch = epoch - 1  # incremented at the start
        set_epoch(getattr(stage, "dataset", None), epoch)


def shut_down_workers(iterator: Any) -> None:
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()
