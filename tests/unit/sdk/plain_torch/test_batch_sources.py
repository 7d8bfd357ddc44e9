"""Every source of batches goes back as far as it can, and says how far that is."""

from __future__ import annotations

import atexit
import copy
import functools
import io
import itertools
import random
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import webdataset
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from trainmedic.errors import ConfigurationError, Rejected, Unsupported
from trainmedic.torch import randomness
from trainmedic.torch.sources import sample_order
from trainmedic.torch.sources.batch_sources import (
    NOT_REPLAYED,
    REPLAYED,
    BatchSource,
    IteratorSource,
    RereadSource,
    SequenceSource,
)
from trainmedic.torch.sources.drawn_source import DrawnSource
from trainmedic.torch.sources.indexed_source import IndexedSource
from trainmedic.torch.sources.sample_order import SkippedRanges
from trainmedic.torch.sources.source_choice import batch_source_for
from trainmedic.torch.sources.stateful_source import StatefulSource

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # of torchdata's loader
    # WebDataset leaves an archive open that was not read to its end.
    pytest.mark.filterwarnings("ignore:unclosed file .*trainmedic-archives:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*trainmedic-archives:pytest.PytestUnraisableExceptionWarning"),
]

SAMPLES, BATCH = 22, 4


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Backwards(Sampler[int]):
    """A sampler of the user's own that draws from Python's generator."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(SAMPLES), SAMPLES))


class Forgetful(Sampler[int]):
    """One that never gives the same order twice, whatever is seeded."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return iter([(index + self.asked) % SAMPLES for index in range(SAMPLES)])


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


class KeepsPlace:
    """A loader in the manner of torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        start, self.next = self.next, 0
        for number in range(start, SAMPLES):
            self.next = number + 1
            yield number
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class CountingWithPlace(IterableDataset[int]):
    """A data set in the manner of Hugging Face's streaming ones: at its end it stays at its end."""

    def __init__(self) -> None:
        self.start = self.next = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.start, SAMPLES):
            self.next = number + 1
            yield number
        self.start = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = self.next = state["next"]


class Buffered(CountingWithPlace):
    """In the manner of Hugging Face's data sets: it keeps how far it has read, and not what its shuffle buffer held."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order, buffer = random.Random(self.epoch), []
        for number in super().__iter__():
            buffer.append(number)
            if len(buffer) > 5:
                yield buffer.pop(order.randrange(len(buffer)))
        yield from buffer


class KeepsBuffer(Buffered):
    """The same, and its state holds the buffer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer: list[int] = []
        self.order = random.Random(0)
        self.is_loaded = False

    def __iter__(self) -> Iterator[int]:
        if not self.is_loaded:
            self.start, self.buffer, self.order = 0, [], random.Random(self.epoch)
        self.is_loaded = False
        for number in CountingWithPlace.__iter__(self):
            self.buffer.append(number)
            if len(self.buffer) > 5:
                yield self.buffer.pop(self.order.randrange(len(self.buffer)))
        while self.buffer:
            yield self.buffer.pop()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "buffer": list(self.buffer), "order": self.order.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.buffer, self.is_loaded = list(state["buffer"]), state["next"] > 0
        self.order.setstate(state["order"])


class NeverTheSame(Buffered):
    """Its buffer is shuffled by the time of day, or the like."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        NeverTheSame.passes += 1
        self.epoch = NeverTheSame.passes
        return super().__iter__()


class CountsEpochs(IterableDataset[int]):
    """In the manner of MosaicML's: the epochs are counted by itself, and it wants to be told its position."""

    def __init__(self) -> None:
        self.next_epoch = 0

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.next_epoch).sample(range(SAMPLES), SAMPLES)
        self.next_epoch += 1
        return iter(order)

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        return {"epoch": self.next_epoch - 1, "num_samples": num_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise NotImplementedError


@functools.cache
def archives() -> str:
    """Two tar files with eleven samples each, for WebDataset."""
    directory = tempfile.TemporaryDirectory(prefix="trainmedic-archives-")
    atexit.register(directory.cleanup)
    for shard in range(2):
        with tarfile.open(f"{directory.name}/{shard}.tar", "w") as archive:
            for number in range(11 * shard, 11 * shard + 11):
                entry = tarfile.TarInfo(f"{number:04d}.txt")
                entry.size = 4
                archive.addfile(entry, io.BytesIO(b"%4d" % number))
    return directory.name + "/{0..1}.tar"


def from_archives(*stages: Any) -> Any:
    pipeline = webdataset.WebDataset(archives(), shardshuffle=2, detshuffle=True, seed=5)
    return webdataset.WebLoader(pipeline.compose(*stages).map(lambda sample: int(sample["txt"])), batch_size=BATCH)


class Endless:
    """Batch number n, for every n."""

    def __getitem__(self, number: int) -> int:
        return number * number


def numbers(**options: Any) -> DataLoader[int]:
    return DataLoader(Numbers(), **{"batch_size": BATCH, **options})


def drawn_at_random() -> list[float]:
    """A batch in the manner of nanoGPT's ``get_batch``, from all generators that people use."""
    return [*torch.rand(2).tolist(), random.random(), float(np.random.rand())]


EXACT: dict[str, Any] = {
    "in order": lambda: numbers(),
    "shuffled": lambda: numbers(shuffle=True),
    "shuffled, the last batch dropped": lambda: numbers(shuffle=True, drop_last=True),
    "shuffled by a generator of its own": lambda: numbers(shuffle=True, generator=torch.Generator().manual_seed(9)),
    "with replacement": lambda: numbers(sampler=RandomSampler(Numbers(), replacement=True, num_samples=30)),
    "weighted": lambda: numbers(sampler=WeightedRandomSampler([1.0, 2.0] * 11, SAMPLES)),
    "a subset": lambda: numbers(sampler=SubsetRandomSampler(range(0, SAMPLES, 2))),
    "distributed": lambda: numbers(sampler=DistributedSampler(Numbers(), num_replicas=2, rank=1)),
    "a sampler of the user": lambda: numbers(sampler=Backwards()),
    "a batch sampler": lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), 5, False)),
    "a list of batches as sampler": lambda: DataLoader(Numbers(), batch_sampler=[[1, 2], [3], [4, 5, 6], [7]]),
    "not batched": lambda: DataLoader(Numbers(), batch_size=None, shuffle=True),
    "a list": lambda: [[number] for number in range(9)],
    "endless": Endless,
    "a function that draws": lambda: drawn_at_random,
    "WebDataset, shuffled by the epoch": lambda: from_archives(webdataset.detshuffle(10, seed=3)),
    "WebDataset, shuffled with a seed": lambda: from_archives(webdataset.shuffle(10, seed=3)),
    "a data set with a shuffle buffer": lambda: DataLoader(Buffered(), batch_size=BATCH),
    "a data set that counts its epochs": lambda: DataLoader(CountsEpochs(), batch_size=BATCH),
    "keeps its place": KeepsPlace,
    "a data set that keeps its place": lambda: DataLoader(CountingWithPlace(), batch_size=BATCH),
    "iterable": lambda: DataLoader(Counting(), batch_size=BATCH),
    "any iterable": lambda: dict.fromkeys(range(9)),
}


DRAWING: dict[str, Any] = {
    "torchdata's loader": lambda: StatefulDataLoader(Numbers(), batch_size=BATCH, shuffle=True),
    "torchdata's loader, a sampler that it does not know": lambda: StatefulDataLoader(
        Numbers(), batch_size=BATCH, sampler=SubsetRandomSampler(range(SAMPLES))
    ),
    "torchdata's loader, with workers": lambda: StatefulDataLoader(
        Numbers(), batch_size=BATCH, shuffle=True, num_workers=1
    ),
}
"""Loaders that draw the order of an epoch from the random numbers of the training, which a checkpoint holds."""


def stored(dataset: Any, **options: Any) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(dataset, **{"batch_size": BATCH, **options})


STREAMED: dict[str, Any] = {
    "a buffer in a generator": lambda: stored(Buffered()),
    "a buffer in the state": lambda: stored(KeepsBuffer()),
    "no buffer": lambda: stored(CountingWithPlace()),
    "no state": lambda: stored(Counting()),
    "WebDataset, shuffled by the epoch": lambda: stored(
        from_archives(webdataset.detshuffle(10, seed=3)).pipeline[0].dataset
    ),
    "a buffer in a state without torchdata's loader": lambda: DataLoader(KeepsBuffer(), batch_size=BATCH),
}
"""torchdata's loader over data that can only be read in order."""


def source_of(source: Any) -> BatchSource:
    torch.manual_seed(1)
    random.seed(1)
    return batch_source_for(source, seed=5, rank=0)


def taken(source: BatchSource, batches: int) -> list[list[Any]]:
    """The next batches, over the ends of epochs."""
    found: list[list[Any]] = []
    while len(found) < batches:
        try:
            batch = source.next()
        except StopIteration:
            continue
        found.append(torch.as_tensor(batch).flatten().tolist() if not isinstance(batch, list) else batch)
    return found


def begun(loader: Any, ahead: int, batches: int) -> tuple[BatchSource, Any, list[list[Any]]]:
    """A source, its state after some batches, and the following ones, which it gave."""
    source = source_of(loader)
    taken(source, ahead)
    state = source.state()
    return source, state, taken(source, batches)


@pytest.mark.parametrize("ahead", [0, 3, 8, 13])
@pytest.mark.parametrize("kind", EXACT)
def test_going_back_gives_the_same_batches_again(kind: str, ahead: int) -> None:
    """Wherever the place is: at the beginning, within an epoch, in a later one; and after any way ahead."""
    source, state, first = begun(EXACT[kind](), ahead, 12)
    assert source.restore(state).startswith(REPLAYED)
    assert taken(source, 12) == first
    source.restore(state)
    assert taken(source, 5) == first[:5]


@pytest.mark.parametrize("kind", [kind for kind in EXACT if kind not in ("iterable", "any iterable")])
def test_another_process_finds_the_same_place(kind: str) -> None:
    """A restart has nothing but the state, and other random numbers."""
    _, state, first = begun(EXACT[kind](), 8, 12)
    later = source_of(EXACT[kind]())
    torch.manual_seed(77)
    later.restore(state)
    assert taken(later, 12) == first


@pytest.mark.parametrize("ahead", [0, 3, 8])
@pytest.mark.parametrize("kind", DRAWING)
def test_a_loader_that_draws_its_order_repeats_it_with_the_random_numbers(kind: str, ahead: int) -> None:
    """In the same process and in another one, over the end of the epoch."""
    source = source_of(DRAWING[kind]())
    taken(source, ahead)
    state, numbers = source.state(), randomness.capture()
    first = taken(source, 9)
    source.stop_loading()
    torch.manual_seed(77)
    for again in (source, batch_source_for(DRAWING[kind](), seed=5, rank=0)):
        assert again.restore(state) == REPLAYED
        randomness.restore(numbers)
        assert taken(again, 9) == first
        again.stop_loading()


@pytest.mark.parametrize("kind", EXACT)
def test_left_out_batches_are_not_seen_again(kind: str) -> None:
    """Not after the next rollback either, which need not leave out anything itself."""
    source, state, all_of_them = begun(EXACT[kind](), 2, 12)
    source.restore(state)
    source.skip(3)
    assert taken(source, 6) == all_of_them[3:9]
    source.restore(state)
    source.skip(2)  # of those that are left out already
    assert taken(source, 6) == all_of_them[3:9]


@pytest.mark.parametrize("kind", EXACT)
def test_what_is_left_out_counts_at_once(kind: str) -> None:
    """Before the first of them would have come, in another rollback and in a restart, which has only the ranges."""
    source, state, all_of_them = begun(EXACT[kind](), 2, 12)
    source.restore(state)
    assert source.skip(3) == 3
    source.restore(state)
    assert source.skip(5) == 2  # that were not left out already
    later = source_of(EXACT[kind]())
    for span in source.skipped.ranges:
        later.skipped.add(*span)
    for again in (source, later):
        again.restore(state)
        assert taken(again, 4) == all_of_them[5:9]


@pytest.mark.parametrize("kind", EXACT)
def test_it_is_known_how_many_were_left_out_already_over_the_end_of_an_epoch(kind: str) -> None:
    """Where that end was seen."""
    source, state, all_of_them = begun(EXACT[kind](), 1, 16)
    source.restore(state)
    source.skip(11)
    taken(source, 2)
    source.restore(state)
    assert source.skip(13) == 2
    assert taken(source, 3) == all_of_them[13:]


def test_a_position_past_the_end_of_an_epoch_is_not_counted_backwards() -> None:
    """The source has become longer since the end was seen."""
    skipped = SkippedRanges([(0, 6, 12), (1, 0, 2)])
    skipped.ends = {0: 6}
    assert skipped.count(0, 9, 4) == 2


def test_a_shorter_data_set_leaves_out_no_more_than_was_asked() -> None:
    source = IndexedSource(DataLoader(Numbers(), batch_size=2), seed=0, rank=0)
    source.restore({**source.state(), "place": SAMPLES + 8})
    assert source.skip(3) == 3
    assert source.skipped.ranges == [(1, 0, 6)]


@pytest.mark.parametrize("kind", EXACT)
def test_what_is_left_out_may_reach_over_epochs(kind: str) -> None:
    """Eleven batches, in epochs of four to ten."""
    source, state, all_of_them = begun(EXACT[kind](), 1, 16)
    source.restore(state)
    source.skip(11)
    assert taken(source, 5) == all_of_them[11:]


@pytest.mark.parametrize("kind", ["shuffled", "a sampler of the user", "with replacement"])
def test_each_epoch_has_an_order_of_its_own(kind: str) -> None:
    """As it would without Trainmedic."""
    source = source_of(EXACT[kind]())
    first, second = (next_epoch(source) for _ in range(2))
    assert first != second
    assert sum(map(len, first)) == sum(map(len, second))


def flat(batches: list[list[Any]]) -> list[Any]:
    return [sample for batch in batches for sample in batch]


def next_epoch(source: BatchSource) -> list[list[int]]:
    found = []
    while True:
        try:
            found.append(torch.as_tensor(source.next()).flatten().tolist())
        except StopIteration:
            return found


def test_every_sample_comes_once_an_epoch() -> None:
    """The last batch is short, or left out where the loader says so."""
    whole = next_epoch(source_of(numbers(shuffle=True)))
    assert sorted(flat(whole)) == list(range(SAMPLES))
    assert [len(batch) for batch in whole] == [4, 4, 4, 4, 4, 2]
    assert [len(batch) for batch in next_epoch(source_of(numbers(drop_last=True)))] == [4] * 5


def test_the_training_random_numbers_are_not_touched() -> None:
    """Shuffling, and beginning to load, draw from generators of their own."""
    source = source_of(numbers(shuffle=True))
    before = (torch.get_rng_state(), random.getstate())
    taken(source, 15)
    source.state()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.parametrize("change", ["batch size", "nothing"])
def test_changing_the_loader_neither_loses_nor_repeats_a_sample(change: str) -> None:
    """In the middle of an epoch, which ends where it would have."""
    source = source_of(numbers(shuffle=True))
    begun = flat(taken(source, 2))
    if change == "batch size":
        source.set_batch_size(2)
    else:
        source.stop_loading()
    rest = next_epoch(source)
    assert sorted(begun + flat(rest)) == list(range(SAMPLES))
    assert len(rest[0]) == (2 if change == "batch size" else BATCH)


class OnceUnreadable(Dataset[int]):
    """Data set that cannot read a sample the first time."""

    def __init__(self, sample: int) -> None:
        self._sample = sample
        self._has_failed = False

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        if index == self._sample and not self._has_failed:
            self._has_failed = True
            raise ValueError("unreadable")
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_data_set_does_not_shift_the_position(workers: int) -> None:
    """The loop may go on: the loader then gives the batch after it."""
    source = source_of(DataLoader(OnceUnreadable(BATCH), batch_size=BATCH, num_workers=workers))
    taken(source, 1)
    with pytest.raises(ValueError, match="unreadable"):
        source.next()
    assert flat(taken(source, 1)) == list(range(2 * BATCH, 3 * BATCH))
    assert source.position == 3 * BATCH
    source.stop_loading()
    assert flat(taken(source, 1)) == list(range(3 * BATCH, 4 * BATCH))
    source.stop_loading()


def test_a_late_batch_keeps_its_position(monkeypatch: pytest.MonkeyPatch) -> None:
    # The loader gives it after all, if the loop goes on.
    source = source_of(numbers(num_workers=1))
    assert isinstance(source, IndexedSource)
    taken(source, 1)
    with monkeypatch.context() as patch:
        patch.setattr(source._iterator, "_get_data", Mock(side_effect=RuntimeError("DataLoader timed out")))
        with pytest.raises(RuntimeError, match="timed out"):
            source.next()
    assert source.position == BATCH
    assert flat(taken(source, 1)) == list(range(BATCH, 2 * BATCH))
    assert source.position == 2 * BATCH
    source.stop_loading()


def test_a_place_holds_for_another_batch_size_too() -> None:
    """A checkpoint from before the change is gone back to after it."""
    source = source_of(numbers(shuffle=True))
    taken(source, 2)
    state, samples = source.state(), flat(taken(source, 4))
    source.set_batch_size(2)
    source.restore(state)
    assert flat(next_epoch(source)) == samples


def test_a_sampler_that_does_not_repeat_itself_is_told_of() -> None:
    """The order of its epoch is another one when it is asked again."""
    source = source_of(numbers(sampler=Forgetful()))
    state = source.state()
    taken(source, 8)  # into the next epoch
    assert source.restore(state).startswith(NOT_REPLAYED)


def test_a_stream_goes_on_and_leaves_out_no_more_than_was_asked() -> None:
    """What is past since the checkpoint counts as left out."""
    source = source_of(iter(range(100)))
    taken(source, 3)
    state = source.state()
    taken(source, 4)
    assert source.restore(state) == f"{NOT_REPLAYED}: a stream only goes on; 4 batches since then are left out"
    source.skip(6)
    assert isinstance(source, IteratorSource)
    assert source.next() == 9
    assert "this process has its own stream" in source_of(iter(range(100))).restore(state)


def test_of_a_stream_what_is_past_is_not_left_out_twice() -> None:
    """Fewer than are past: all of them are left out already."""
    source = source_of(iter(range(100)))
    state = source.state()
    taken(source, 4)
    source.restore(state)
    source.skip(3)
    assert source.next() == 4


def test_another_process_does_not_forget_the_epoch_that_is_too_long_to_read_again() -> None:
    """It begins that epoch anew, so that the training ends with the epoch that it was to end with."""
    one, other = (batch_source_for(DataLoader(Counting(), batch_size=1), seed=5, rank=0, reread=4) for _ in range(2))
    taken(one, 6)
    state = {**one.state(), "epoch": 3}
    assert other.restore(state) == f"{NOT_REPLAYED}: the epoch begins anew, for more than 4 would have to be read again"
    assert (other.epoch, other.position) == (3, 0)


def test_drawing_does_not_touch_the_random_numbers_of_the_training() -> None:
    """Dropout goes on as if the loop had not drawn anything, however often a batch is drawn."""
    source = source_of(drawn_at_random)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    assert len({tuple(batch) for batch in taken(source, 5)}) == 5
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


def test_ranks_draw_batches_of_their_own() -> None:
    """As they do where each seeds its generators with its rank."""
    one, other = (batch_source_for(drawn_at_random, seed=5, rank=rank) for rank in (0, 1))
    assert taken(one, 1) != taken(other, 1)


def test_a_function_that_keeps_a_position_is_a_stream_and_loses_no_batch() -> None:
    """It is found out by the first batch, and a resumed run is told too."""
    counted = iter(range(1000))
    source = batch_source_for(lambda: [next(counted)], seed=5, rank=0)
    assert taken(source, 3) == [[0], [1], [2]]
    state = source.state()
    taken(source, 4)
    assert source.restore(state) == f"{NOT_REPLAYED}: a stream only goes on; 4 batches since then are left out"
    source.skip(6)
    assert taken(source, 1) == [[9]]
    later = batch_source_for(lambda: [next(counted)], seed=5, rank=0)
    assert later.restore(state).startswith(f"{NOT_REPLAYED}: the function that draws them keeps its own")
    assert taken(later, 1) == [[10]]


@pytest.mark.parametrize(
    "batch",
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([True])),
        {"ids": torch.arange(3), "more": [np.arange(3), "text"]},
        torch.arange(3, dtype=torch.uint8),
        7,
    ],
)
def test_batches_of_every_make_are_compared(batch: Any) -> None:
    """Each by what it holds: the same twice is a function that repeats itself."""
    source = batch_source_for(lambda: copy.deepcopy(batch), seed=5, rank=0)
    source.next()
    assert source.state()["repeats"] is True
    fresh = itertools.count()
    other = batch_source_for(lambda: (copy.deepcopy(batch), np.full(2, next(fresh))), seed=5, rank=0)
    other.next()
    assert other.state()["repeats"] is False


def test_what_makes_batches_but_returns_none_is_an_error_at_once() -> None:
    """A generator function, or a class: its result is what was meant."""

    def generator() -> Iterator[int]:
        yield 1

    for loader in (generator, Endless.__class__):
        with pytest.raises(ConfigurationError, match="returns no batch when called"):
            batch_source_for(loader, 0, 0)


def test_more_than_some_epochs_are_not_left_out() -> None:
    """A slip of the pen must not keep the training busy with counting."""
    source = batch_source_for(DataLoader(list(range(12)), batch_size=4), seed=5, rank=0)
    source.check_skip(30)
    with pytest.raises(Rejected, match="cannot skip 31 batches: an epoch has 3"):
        source.check_skip(31)


def test_what_would_have_to_be_read_too_long_goes_on() -> None:
    """A limit, so that a rollback does not read for hours."""
    source = batch_source_for(DataLoader(Counting(), batch_size=1), seed=5, rank=0, reread=4)
    taken(source, 6)
    state = source.state()
    taken(source, 2)
    assert source.restore(state).startswith(NOT_REPLAYED)
    assert taken(source, 1) == [[8]]


def test_a_shuffle_buffer_that_would_have_to_be_read_too_long_is_filled_anew() -> None:
    """The data set goes on from where it was, and nothing better is said."""
    source = batch_source_for(DataLoader(Buffered(), batch_size=1), seed=5, rank=0, reread=4)
    taken(source, 6)
    state = source.state()
    assert source.restore(state).startswith(f"{NOT_REPLAYED}: more than 4 would have to be read again")
    assert len(taken(source, 3)) == 3
    source = batch_source_for(DataLoader(Buffered(), batch_size=1), seed=5, rank=0, reread=4)
    assert len(taken(source, SAMPLES)) == SAMPLES


@pytest.mark.parametrize("ahead", [1, 3, 8])
@pytest.mark.parametrize("kind", STREAMED)
def test_a_loader_over_a_stream_gives_the_same_batches_whatever_its_state_lacks(kind: str, ahead: int) -> None:
    """In the same process and in another one. Samples that lie in a buffer come again, for the epoch is read again."""
    source, state, first = begun(STREAMED[kind](), ahead, 8)
    for again in (source, source_of(STREAMED[kind]())):
        assert again.restore(state).startswith(REPLAYED)
        assert taken(again, 8) == first


def test_only_what_a_state_lacks_is_read_again() -> None:
    """A data set whose state holds its buffer goes on from there at once, however far it is."""
    for dataset, held_back in ((Buffered(), "5 samples in buffer"), (KeepsBuffer(), ""), (CountingWithPlace(), "")):
        source = batch_source_for(stored(dataset, batch_size=1), seed=5, rank=0, reread=4)
        taken(source, 7)
        state = source.state()
        assert state["held_back"] == held_back
        told = source.restore(state)
        expected = f"{NOT_REPLAYED}: more than 4 would have to be read again, because the state of the data set lacks"
        assert told.startswith(f"{expected} {held_back}") if held_back else told == REPLAYED
        assert len(taken(source, 3)) == 3


def test_another_process_sees_that_a_stream_does_not_repeat_itself() -> None:
    """The last batches before the place are compared with those that the checkpoint holds."""
    source = source_of(stored(NeverTheSame()))
    taken(source, 3)
    state = source.state()
    later = source_of(stored(NeverTheSame()))
    assert later.restore(state) == f"{NOT_REPLAYED}: the source gives others when it is read again"


def test_what_worker_processes_hold_back_is_not_known() -> None:
    """Their buffers cannot be seen, and the answer does not claim that there are none."""
    source = source_of(stored(Buffered(), num_workers=1))
    taken(source, 3)
    state = source.state()
    told = source.restore(state)
    source.stop_loading()
    assert told == f"{REPLAYED}, if the state of the data set holds all that its workers hold back"


class OwnLoader:
    """A loader in a class of the user's."""

    def __init__(self, loader: DataLoader[int]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


@pytest.mark.parametrize("wrap", [lambda loader: loader, OwnLoader])
def test_a_stream_with_lasting_workers_is_read_again(wrap: Any) -> None:
    """Its loader would use the workers of before, which have ended."""
    source = source_of(wrap(DataLoader(Counting(), batch_size=BATCH, num_workers=1, persistent_workers=True)))
    assert isinstance(source, RereadSource)
    taken(source, 1)
    state, after = source.state(), flat(taken(source, 2))
    source.restore(state)
    assert flat(taken(source, 2)) == after
    source.stop_loading()


def test_a_loader_that_keeps_its_position_begins_an_epoch_with_new_workers() -> None:
    source = source_of(StatefulDataLoader(Numbers(), batch_size=BATCH, num_workers=1, persistent_workers=True))
    begun = flat(taken(source, 1))
    source.start_epoch(0)
    assert flat(taken(source, 1)) == begun
    source.stop_loading()


def test_a_source_that_gives_other_batches_each_time_is_told_of() -> None:
    """As WebDataset's shuffling without a seed does; what was read again shows it."""

    class Others(IterableDataset[int]):
        passes = 0

        def __iter__(self) -> Iterator[int]:
            self.passes += 1
            return iter(range(self.passes * 100, self.passes * 100 + SAMPLES))

    source = source_of(DataLoader(Others(), batch_size=BATCH))
    taken(source, 3)
    state = source.state()
    taken(source, 2)
    assert source.restore(state) == f"{NOT_REPLAYED}: the source gives others when it is read again"
    taken(source, 1)
    later = source.state()
    assert source.restore(later) == f"{NOT_REPLAYED}: the source gives others when it is read again"


def test_a_source_that_has_become_shorter_is_told_of() -> None:
    """Nothing is made up."""
    batches = dict.fromkeys(range(9))
    source = source_of(batches)
    taken(source, 8)
    state = source.state()
    for number in range(4, 9):
        del batches[number]
    assert source.restore(state) == f"{NOT_REPLAYED}: the source has only 4 batches this time"


@pytest.mark.parametrize(
    ("loader", "kind"),
    [
        (numbers(), IndexedSource),
        (DataLoader(Counting()), RereadSource),
        (KeepsPlace(), StatefulSource),
        ([1, 2], SequenceSource),
        (iter([1, 2]), IteratorSource),
        (drawn_at_random, DrawnSource),
        (DataLoader(Numbers(), batch_sampler=(batch for batch in [[1], [2]])), RereadSource),  # of unknown length
    ],
)
def test_the_best_batch_source_that_a_loader_allows_serves_it(loader: Any, kind: type[BatchSource]) -> None:
    """Exact where it can be."""
    assert type(batch_source_for(loader, 0, 0)) is kind


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (numbers(), "Indexed"),
        (DataLoader(Counting()), "Reread"),
        (KeepsPlace(), "Stateful"),
        ([1, 2], "Numbered"),
        (iter([1, 2]), "Stream"),
        (drawn_at_random, "Drawn"),
    ],
)
def test_the_kind_that_a_checkpoint_names_stays_as_it_is(loader: Any, name: str) -> None:
    """Else the place in the data of a checkpoint that an earlier release wrote would be lost."""
    assert batch_source_for(loader, 0, 0).state()["kind"] == name


def test_what_gives_no_batches_is_an_error_at_once() -> None:
    """Not at the first rollback, at night."""
    with pytest.raises(ConfigurationError, match="no batches can be read from a int"):
        batch_source_for(7, 0, 0)


def test_what_cannot_be_changed_says_so() -> None:
    """Workers and batch size of what is no plain loader; the batch size of a batch sampler."""
    with pytest.raises(Unsupported):
        source_of([1, 2]).set_workers(2)
    with pytest.raises(Unsupported):
        source_of([1, 2]).set_batch_size(2)
    with pytest.raises(Rejected):
        source_of(EXACT["a list of batches as sampler"]()).set_batch_size(2)


def test_a_seed_is_mixed_from_its_numbers() -> None:
    """Neighbours differ in half of the bits, and it is the same everywhere."""
    seeds = {randomness.mixed_seed(*pair) for pair in ((0, 0), (0, 1), (1, 0), (1, 1), (0,), (0, 0, 0))}
    assert len(seeds) == 6
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert 15 < bin(randomness.mixed_seed(0, 0) ^ randomness.mixed_seed(0, 1)).count("1") < 48


def test_the_generators_come_back_as_they_were() -> None:
    """Python's, NumPy's and PyTorch's."""
    numpy = pytest.importorskip("numpy")

    def drawn() -> list[float]:
        return [random.random(), float(numpy.random.rand()), float(torch.rand(1))]

    state = randomness.capture()
    first = drawn()
    with randomness.preserved():
        drawn()
        randomness.seed(3)
    second = drawn()
    randomness.restore(state)
    assert drawn() == first
    assert drawn() == second


@dataclass
class Wrapped:
    numbers: torch.Tensor


@pytest.mark.parametrize(
    ("draw", "repeats"),
    [
        (lambda: {"text": np.array(["one", "two"])}, True),
        (lambda: {"text": np.array([str(np.random.rand())])}, True),
        (lambda: Wrapped(torch.rand(3)), False),  # its comparison raises
    ],
)
def test_a_batch_of_any_kind_can_be_drawn(draw: Any, repeats: bool) -> None:
    """One that cannot be compared counts as a stream's."""
    source = batch_source_for(draw, seed=5, rank=0)
    assert type(source.next()) is type(source.next())
    assert source.state()["repeats"] is repeats


@pytest.mark.parametrize("own_generator", [False, True])
def test_an_order_that_is_too_long_to_hold_is_drawn_in_parts(
    own_generator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As minGPT's 10^10 samples. The training's random numbers stay as they are, and a second source gives the same."""
    monkeypatch.setattr(sample_order, "_CHUNK", 6)

    def loader() -> DataLoader[int]:
        generator = torch.Generator().manual_seed(7) if own_generator else None
        sampler = RandomSampler(Numbers(), replacement=True, num_samples=10**10, generator=generator)
        return DataLoader(Numbers(), BATCH, sampler=sampler)

    before = randomness.capture()
    source = batch_source_for(loader(), 1, 0)
    batches = [source.next().tolist() for _ in range(8)]
    assert not randomness.has_moved(before)
    assert len({number for batch in batches for number in batch}) > 8
    torch.manual_seed(5)
    again = batch_source_for(loader(), 1, 0)
    held = [again.next().tolist() for _ in range(3)]
    state = again.state()
    held += [again.next().tolist() for _ in range(4)]
    assert again.restore(state) == REPLAYED
    assert again.skip(2) == 2
    assert (held, again.next().tolist()) == (batches[:7], batches[5])
    other = batch_source_for(loader(), 2, 0)
    assert other.restore(state) == REPLAYED
    assert other.next().tolist() == batches[3]
