"""In which order a data set's samples come: the same for an epoch whenever one asks.

A sampler draws from generators that have moved on when an epoch is wanted again. Here it is asked once an
epoch, with the generators seeded by the epoch's number, and put back afterwards. What is not made of a sampler
of known length is not here (``feeds``).
"""

from __future__ import annotations

import zlib
from array import array
from itertools import islice
from typing import Any, Iterable, Iterator, Sequence

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from trainmedic.torch import randomness

Place = int
"""How many entries of the epoch's order lie before: samples, or batches where the user's sampler makes them."""


class SampleOrder:
    """The order of a `DataLoader` whose data set is indexed and whose sampler knows its length.

    ``batch_size`` is None where each entry is a batch by itself: of a custom batch sampler, or of a loader that
    does not batch (``batches`` is False then).
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self._seed = seed
        given: Any = loader.batch_sampler
        self.batches = given is not None
        self.drop_last = False
        self.batch_size: int | None = None
        self._sampler: Any = loader.sampler if given is None else given
        if type(given) is BatchSampler:
            self._sampler, self.batch_size, self.drop_last = given.sampler, given.batch_size, given.drop_last
        self._epoch: int | None = None
        self._entries: Sequence[Any] = ()
        self._fingerprint: int | None = None

    @staticmethod
    def is_known(loader: DataLoader[Any]) -> bool:
        """Whether the loader's sampler says how many entries an epoch has."""
        try:
            len(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)  # type: ignore[arg-type]
        except TypeError:
            return False
        return True

    def entries(self, epoch: int) -> Sequence[Any]:
        """Those of an epoch; its sampler is asked again only for another epoch than last time."""
        if epoch != self._epoch:
            self._entries = self._ask(epoch)
            self._epoch, self._fingerprint = epoch, None
        return self._entries

    def fingerprint(self, epoch: int) -> int:
        """A number by which two orders can be told apart."""
        entries = self.entries(epoch)
        if isinstance(entries, range):
            return len(entries)
        if self._fingerprint is None:
            self._fingerprint = zlib.crc32(entries if isinstance(entries, array) else repr(entries).encode())
        return self._fingerprint

    def _ask(self, epoch: int) -> Sequence[Any]:
        sampler = self._sampler
        if type(sampler) is SequentialSampler:
            return range(len(sampler))
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        value = randomness.mixed_seed(self._seed, epoch)
        with randomness.preserved():
            randomness.seed(value)
            generators = [one for one in _generators(sampler) if isinstance(one, torch.Generator)]
            states = [one.get_state() for one in generators]
            for one in generators:
                one.manual_seed(value)
            try:
                return _compact(islice(sampler, len(sampler)))
            finally:
                for one, state in zip(generators, states, strict=True):
                    one.set_state(state)


def _generators(sampler: Any) -> Iterator[Any]:
    """Of a sampler and of those that it is made of."""
    seen: list[Any] = []
    while sampler is not None and all(sampler is not one for one in seen):
        seen.append(sampler)
        yield getattr(sampler, "generator", None)
        sampler = getattr(sampler, "sampler", None)


def _compact(entries: Iterable[Any]) -> Sequence[Any]:
    """Whole numbers take 8 bytes each, anything else what it takes."""
    held = list(entries)
    try:
        return array("q", held)
    except (TypeError, OverflowError):
        return held


class LeftOutRanges:
    """Places that are not to be trained on: of each epoch some ranges, each a first place and one past the last."""

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self.ranges: list[tuple[int, Place, Place]] = []
        for epoch, start, stop in ranges:
            self.add(epoch, start, stop)

    def add(self, epoch: int, start: Place, stop: Place) -> None:
        if start >= stop:
            return
        joined = []
        for other in self.ranges:
            if other[0] == epoch and other[1] <= stop and start <= other[2]:
                start, stop = min(start, other[1]), max(stop, other[2])
            else:
                joined.append(other)
        self.ranges = sorted([*joined, (epoch, start, stop)])

    def holds(self, epoch: int, place: Place) -> bool:
        return any(one == epoch and start <= place < stop for one, start, stop in self.ranges)

    def remaining(self, epoch: int, place: Place, end: Place) -> Iterator[tuple[Place, Place]]:
        """The places of the epoch from `place` to before `end` that are not left out: ranges, in order."""
        for one, start, stop in self.ranges:
            if one == epoch and stop > place:
                if place < min(start, end):
                    yield place, min(start, end)
                place = stop
        if place < end:
            yield place, end


def for_other_rank_count(feed: dict[str, Any] | None, ranks: int, now: int) -> dict[str, Any] | None:
    """The state of a feed as another number of ranks goes on from it, which share the data like cards dealt out:
    as far as all of them together had come. None of a feed whose place is not a number.
    """
    if feed is None or "loader" in feed or feed.get("at_start") is not None:
        return None
    left_out = [[epoch, start * ranks // now, -(-stop * ranks // now)] for epoch, start, stop in feed["left_out"]]
    # The generator is another rank's: two of them would draw the same numbers.
    shared = {name: value for name, value in feed.items() if name != "generator"}
    return {**shared, "place": feed["place"] * ranks // now, "left_out": left_out}
