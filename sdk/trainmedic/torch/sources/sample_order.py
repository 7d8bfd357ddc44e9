"""Reproducible order of samples by epoch, and its skipped positions."""

from __future__ import annotations

import zlib
from array import array
from contextlib import contextmanager
from itertools import islice
from typing import Any, Iterable, Iterator, Mapping, Sequence

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from trainmedic.torch import randomness

_MOST_ENDS = 1000  # epochs whose end is remembered
_MOST_AT_ONCE = 2**30  # entries; minGPT's sampler has 10^10
_CHUNK = 2**16  # entries to draw at once of a longer order
Position = int  # number of entries before it. An entry is a sample, or a batch of the user's batch sampler.


class SampleOrder:
    """Order of a `DataLoader` with an indexed data set and a sampler of known length.

    ``batch_size`` is None if each entry is a batch, or samples are not collected.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._seed = seed
        batcher: Any = loader.batch_sampler
        self.has_batches = batcher is not None  # False with ``batch_size=None``: samples are not collected
        self.drop_last = False
        self.batch_size: int | None = None
        self._sampler: Any = loader.sampler if batcher is None else batcher
        if type(batcher) is BatchSampler:
            self._sampler, self.batch_size, self.drop_last = batcher.sampler, batcher.batch_size, batcher.drop_last
        self._epoch: int | None = None
        self._entries: Sequence[Any] = ()
        self._fingerprint: int | None = None

    @staticmethod
    def is_known(loader: DataLoader[Any]) -> bool:
        try:
            len(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)  # type: ignore[arg-type]
        except TypeError:
            return False
        return True

    def entries(self, epoch: int) -> Sequence[Any]:
        if epoch != self._epoch:
            self._entries = self._draw_entries(epoch)
            self._epoch, self._fingerprint = epoch, None
        return self._entries

    def fingerprint(self, epoch: int) -> int:
        """Return a number that differs between orders."""
        entries = self.entries(epoch)
        if isinstance(entries, range):
            return len(entries)
        if self._fingerprint is None:
            if isinstance(entries, _GrowingEntries):
                entries = [len(entries), *entries[:_CHUNK]]
            self._fingerprint = zlib.crc32(entries if isinstance(entries, array) else repr(entries).encode())
        return self._fingerprint

    def _draw_entries(self, epoch: int) -> Sequence[Any]:
        sampler = self._sampler
        if type(sampler) is SequentialSampler:
            return range(len(sampler))
        for member in _with_inner(sampler):
            if hasattr(member, "set_epoch"):
                member.set_epoch(epoch)
        value = randomness.mixed_seed(self._seed, epoch)
        held = (getattr(member, "generator", None) for member in _with_inner(sampler))
        random = _OrderRandom(value, [each for each in held if isinstance(each, torch.Generator)])
        if len(sampler) > _MOST_AT_ONCE:
            return _GrowingEntries(sampler, random)
        with random.used():
            return _compact(islice(sampler, len(sampler)))


class _OrderRandom:
    # Random numbers for the draw of an order, perhaps in chunks. The training's generators keep their states.

    def __init__(self, seed: int, generators: Sequence[torch.Generator]) -> None:
        self._seed = seed
        self._generators = generators
        # States after the last chunk, of the CPU generators and of `_generators`; None before the first chunk.
        self._reached: tuple[Mapping[str, Any], list[torch.Tensor]] | None = None

    @contextmanager
    def used(self) -> Iterator[None]:
        states = [each.get_state() for each in self._generators]
        with randomness.preserved():
            if self._reached is None:
                randomness.seed(self._seed)
                for each in self._generators:
                    each.manual_seed(self._seed)
            else:
                randomness.restore(self._reached[0])
                self._set(self._reached[1])
            try:
                yield
                self._reached = {**randomness.capture(), "cuda": []}, [each.get_state() for each in self._generators]
            finally:
                self._set(states)

    def _set(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


class _GrowingEntries(Sequence[Any]):
    # Of an order that is too long to draw at once.

    def __init__(self, sampler: Any, random: _OrderRandom) -> None:
        self._length = len(sampler)
        self._sampler = sampler
        self._random = random
        self._iterator: Iterator[Any] | None = None
        self._drawn: list[Sequence[Any]] = []  # chunks

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: Any) -> Any:
        if not isinstance(place, slice):
            return self._chunk(place // _CHUNK)[place % _CHUNK]
        start, stop, _ = place.indices(self._length)
        return [self[number] for number in range(start, stop)]

    def _chunk(self, number: int) -> Sequence[Any]:
        while len(self._drawn) <= number:
            with self._random.used():
                if self._iterator is None:
                    self._iterator = iter(self._sampler)
                self._drawn.append(_compact(islice(self._iterator, _CHUNK)))
        return self._drawn[number]


def _with_inner(sampler: Any) -> Iterator[Any]:
    visited: list[Any] = []
    while sampler is not None and all(sampler is not other for other in visited):
        visited.append(sampler)
        yield sampler
        inner = getattr(sampler, "batch_sampler", None)  # of Accelerate's samplers
        sampler = getattr(sampler, "sampler", None) if inner is None else inner


def _compact(entries: Iterable[Any]) -> Sequence[Any]:
    held = list(entries)
    try:
        return array("q", held)
    except (TypeError, OverflowError):
        return held


class SkippedRanges:
    """Untrained ranges: epoch, first, end."""

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self.ranges: list[tuple[int, Position, Position]] = []
        self.ends: dict[int, Position] = {}  # observed ends of the last epochs
        for epoch, start, stop in ranges:
            self.add(epoch, start, stop)

    def add(self, epoch: int, start: Position, stop: Position) -> None:
        if start >= stop:
            return
        joined = []
        for other in self.ranges:
            if other[0] == epoch and other[1] <= stop and start <= other[2]:
                start, stop = min(start, other[1]), max(stop, other[2])
            else:
                joined.append(other)
        self.ranges = sorted([*joined, (epoch, start, stop)])

    def contains(self, epoch: int, position: Position) -> bool:
        return any(other == epoch and start <= position < stop for other, start, stop in self.ranges)

    def end_epoch(self, epoch: int, end: Position) -> None:
        """Record an epoch's end; ranges beyond it continue in the next."""
        self.ends = dict([*self.ends.items(), (epoch, end)][-_MOST_ENDS:])
        ranges, self.ranges = self.ranges, []
        for other, start, stop in ranges:
            beyond = stop - max(start, end) if other == epoch else 0
            self.add(other, start, stop - max(beyond, 0))
            self.add(epoch + 1, 0, beyond)

    def count(self, epoch: int, start: Position, entries: int) -> int:
        """Count the skipped among ``entries`` from ``start``, across known ends of epochs."""
        counted = 0
        while entries > 0:
            end = max(start, min(start + entries, self.ends.get(epoch, start + entries)))
            counted += end - start - sum(stop - first for first, stop in self.remaining(epoch, start, end))
            if epoch not in self.ends:
                break
            entries -= end - start
            epoch, start = epoch + 1, 0
        return counted

    def remaining(self, epoch: int, position: Position, end: Position) -> Iterator[tuple[Position, Position]]:
        for other, start, stop in self.ranges:
            if other == epoch and stop > position:
                if position < min(start, end):
                    yield position, min(start, end)
                position = stop
        if position < end:
            yield position, end


def for_other_rank_count(state: dict[str, Any] | None, ranks_then: int, ranks_now: int) -> dict[str, Any] | None:
    """Scale a state's positions for another number of ranks; None if impossible."""
    # The loader's own position, and the random state of an epoch's start, are one rank's.
    if state is None or "loader" in state or state.get("at_start") is not None:
        return None
    skipped = [
        [epoch, start * ranks_then // ranks_now, -(-stop * ranks_then // ranks_now)]
        for epoch, start, stop in state["left_out"]
    ]
    # Drop the generator, because two ranks would draw the same numbers, and the ends, which change.
    shared = {name: value for name, value in state.items() if name not in ("generator", "ends")}
    return {**shared, "place": state["place"] * ranks_then // ranks_now, "left_out": skipped}
