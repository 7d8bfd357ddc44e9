"""Where batches come from, and how each kind of source goes back to a position in them.

Not here: which of them serves a loader (``source_choice``), the one for ordinary data loaders
(``indexed_source``), and the loop over the batches (``run``). Who calls it: that loop, and ``restore``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Iterator

from trainmedic.errors import Unsupported
from trainmedic.job.interrupt import fetch
from trainmedic.recovery.fingerprints import Fingerprint, fingerprint, read
from trainmedic.torch import randomness
from trainmedic.torch.sources.sample_order import Position, SkippedRanges

REPLAYED = "the same batches again"
NOT_REPLAYED = "not the same batches"
REREAD = 1000
"""The default of how many batches are read again, at most, to reach a position in a source without random access."""


class BatchSource:
    """Batches, epoch after epoch, and the position in them.

    ``position`` says how much of the present epoch was delivered; in batches, unless the source says otherwise.
    ``skipped`` are positions that are not delivered, in this and every later pass over the epoch.
    ``batch_size`` and ``workers`` are None where they are not known or cannot be changed.
    """

    kind: str
    """The name of this kind of source in checkpoints. It must not change, so some are older names of the class."""
    batch_size: int | None = None
    workers: int | None = None

    def __init__(self) -> None:
        self.epoch = 0
        self.position: Position = 0
        self.skipped = SkippedRanges()

    @property
    def samples_per_batch(self) -> int | None:
        """How many samples this rank's batches have; None where that is not known."""
        return self.batch_size

    def next(self) -> Any:
        """The next batch. Raises StopIteration at the end of an epoch; the next call begins the next one."""
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
        """Read one batch from the source, to be skipped or not, and advance ``position``. Raises StopIteration."""
        raise StopIteration

    def state(self) -> dict[str, Any]:
        """What `restore` needs to come back here. The keys are those of checkpoints: ``place`` holds the position."""
        return {
            "kind": self.kind,
            "epoch": self.epoch,
            "place": self.position,
            "left_out": [list(span) for span in self.skipped.ranges],
            "ends": [list(end) for end in self.skipped.ends.items()],
            "leaving_out": 0,  # where earlier releases wrote, and read, how many of the next ones were to be skipped
        }

    def restore(self, state: dict[str, Any]) -> str:
        """Go to where `state` was taken, and say what comes next. Batches skipped since then stay skipped."""
        self.epoch, self.position = state["epoch"], state["place"]
        ends = {**self.skipped.ends, **dict(state.get("ends", ()))}
        self.skipped = SkippedRanges([*self.skipped.ranges, *state["left_out"]])
        self.skipped.ends = ends
        self.skipped.add(self.epoch, self.position, self.position + state["leaving_out"])
        return REPLAYED

    def knows(self, state: dict[str, Any]) -> bool:
        """Whether `state` is of this kind of source; the script may have changed its loader since it was written."""
        return state.get("kind") in (None, self.kind)

    def start_epoch(self, epoch: int) -> str:
        """Go to the beginning of an epoch, because a position of another source means nothing here."""
        self.stop_loading()
        self.epoch, self.position = epoch, 0
        self.skipped = SkippedRanges()
        return f"{NOT_REPLAYED}: the checkpoint was written with a loader of another kind; its epoch begins anew"

    def check_skip(self, batches: int) -> None:
        """Raises Rejected if so many batches cannot be skipped."""

    def skip(self, batches: int) -> int:
        """Skip the next ``batches`` batches; those that are skipped already count. Returns how many were not."""
        already = self.skipped.count(self.epoch, self.position, batches)
        self.skipped.add(self.epoch, self.position, self.position + batches)
        return batches - already

    def stop_loading(self) -> None:
        """Drop the batches that are being loaded, because loading was interrupted or has to start again."""

    def set_workers(self, count: int) -> None:
        raise Unsupported("only the workers of a plain DataLoader over an indexed data set can be changed")

    def set_batch_size(self, size: int) -> None:
        raise Unsupported("only the batch size of a plain DataLoader over an indexed data set can be changed")


class SequenceSource(BatchSource):
    """Batches of a sequence; an epoch ends by its length or an IndexError, or never."""

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
    """The base of sources that have an iterator for each epoch."""

    def __init__(self) -> None:
        super().__init__()
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
        shut_down_workers(self._iterator)
        self._iterator = None

    @abstractmethod
    def begin_epoch(self) -> Iterator[Any]:
        """The iterator of the present epoch."""


class RereadSource(IteratedSource):
    """Batches of an iterable. It comes to a position by reading the epoch up to there.

    ``most`` is how many batches may be read again for that.
    """

    kind = "Reread"

    def __init__(self, source: Any, most: int) -> None:
        super().__init__()
        self._source = source
        self._most = most
        self._at_start: dict[str, Any] | None = None
        # Of the batches of the present epoch, to see whether they come again when they are read again.
        self._fingerprints: list[Fingerprint] = []

    def fetch(self) -> Any:
        batch = super().fetch()
        if len(self._fingerprints) < min(self.position, self._most):
            self._fingerprints.append(fingerprint(batch))
        return batch

    def state(self) -> dict[str, Any]:
        if self._iterator is not None:
            return {**super().state(), "at_start": self._at_start, "generator": None}
        return {**super().state(), "at_start": None, "generator": self._generator_state()}

    def restore(self, state: dict[str, Any]) -> str:
        position = state["place"]
        if position > self._most and (self.epoch, self.position) < (state["epoch"], position):
            super().restore(state)  # another process wrote it: here is no iterator that could go on
            self.position = 0
            return f"{NOT_REPLAYED}: the epoch begins anew, for more than {self._most} would have to be read again"
        if position > self._most:
            return f"{NOT_REPLAYED}: it goes on, for more than {self._most} would have to be read again"
        expected = self._fingerprints if self.epoch == state["epoch"] else []
        super().restore(state)
        self.stop_loading()
        self._fingerprints = []
        at_start = state["at_start"]
        if at_start is None:  # between two epochs, or before the first
            self._set_generator(state.get("generator"))
            return REPLAYED
        randomness.restore(at_start["random"])
        self._set_generator(at_start["generator"])
        self._iterator = self.begin_epoch()
        for batches in range(position):
            try:
                self._fingerprints.append(fingerprint(next(self._iterator)))
            except StopIteration:
                self._iterator = None
                return f"{NOT_REPLAYED}: the source has only {batches} batches this time"
        if any(read(before) != read(again) for before, again in zip(expected, self._fingerprints, strict=False)):
            return f"{NOT_REPLAYED}: the source gives others when it is read again"
        return read_again(position)

    def begin_epoch(self) -> Iterator[Any]:
        if self.position == 0:
            self._fingerprints = []
        self._at_start = {"random": randomness.capture(), "generator": self._generator_state()}
        for part in (self._source, getattr(self._source, "dataset", None)):
            set_epoch(part, self.epoch)
        return iter(self._source)

    def _generator_state(self) -> Any:
        """The state of the generator that the source has of its own, as a loader may."""
        generator = getattr(self._source, "generator", None)
        return generator.get_state() if generator is not None else None

    def _set_generator(self, state: Any) -> None:
        generator = getattr(self._source, "generator", None)
        if generator is not None and state is not None:
            generator.set_state(state)


class ForwardSource(BatchSource):
    """The base of sources that cannot go back. Their batches are one epoch, however long."""

    def __init__(self) -> None:
        super().__init__()
        self._passed = 0  # batches since the checkpoint of a rollback, which cannot be read again

    def restore(self, state: dict[str, Any]) -> str:
        self._passed = max(self.position - state["place"], 0)
        return f"{NOT_REPLAYED}: a stream only goes on; {self._passed} batches since then are left out"

    def skip(self, batches: int) -> int:
        """Skip batches after the checkpoint's position; those that have passed since then count."""
        return super().skip(max(batches - self._passed, 0))


class IteratorSource(ForwardSource):
    """Batches of an iterator."""

    kind = "Stream"

    def __init__(self, source: Iterator[Any]) -> None:
        super().__init__()
        self._source = source

    def fetch(self) -> Any:
        batch = fetch(self._source)
        self.position += 1
        return batch


def read_again(batches: int) -> str:
    """What is said where so many batches were read again to come to a position."""
    return f"{REPLAYED}, if the source repeats itself: {batches} were read again"


def set_epoch(part: Any, epoch: int) -> None:
    """Tell a loader, sampler or data set which epoch begins, if it wants to know."""
    if hasattr(part, "set_epoch"):
        part.set_epoch(epoch)
    elif hasattr(part, "next_epoch"):
        part.next_epoch = epoch  # MosaicML's data sets, which count by themselves, and would not go back
    for stage in getattr(part, "pipeline", ()):  # of WebDataset
        if isinstance(getattr(stage, "epoch", None), int):
            stage.epoch = epoch - 1  # it adds one when it begins
        set_epoch(getattr(stage, "dataset", None), epoch)


def shut_down_workers(iterator: Any) -> None:
    """End the worker processes of a loader's iterator, where it has any."""
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()
