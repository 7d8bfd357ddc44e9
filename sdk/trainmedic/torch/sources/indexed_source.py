"""Batch source for an indexed `DataLoader`, which can continue at any batch.

Workers seed random generators by batch position.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Callable, Iterator

import torch
from torch.utils.data import DataLoader, get_worker_info

from trainmedic.errors import Rejected
from trainmedic.job.interrupt import fetch
from trainmedic.torch import randomness
from trainmedic.torch.sources.batch_sources import NOT_REPLAYED, REPLAYED, BatchSource, shut_down_workers
from trainmedic.torch.sources.sample_order import Position, SampleOrder

_MOST_SKIPPED_EPOCHS = 10  # by a rollback; more is an error in the playbook


class IndexedSource(BatchSource):
    """Batches over an indexed data set. ``rank`` distinguishes the workers' seeds.

    ``position`` counts samples, or batches of a custom batch sampler.
    """

    kind = "Indexed"

    def __init__(self, loader: DataLoader[Any], seed: int, rank: int) -> None:
        super().__init__()
        self._pattern = loader  # the user's, whose options `_build` copies
        self._seed = seed
        self._rank = rank
        self._order = SampleOrder(loader, seed)
        self.batch_size = self._order.batch_size
        self.workers: int | None = loader.num_workers
        self._loader: DataLoader[Any] | None = None
        self._iterator: Iterator[Any] | None = None
        # End of each requested batch: the loader asks ahead and delivers in order.
        self._ends: deque[Position] = deque()

    def next(self) -> Any:
        iterator, received = self._iterator, self._received
        try:
            batch = fetch(self._begin() if iterator is None else iterator)
        except StopIteration:
            self._iterator = None
            self.epoch, self.position = self.epoch + 1, 0
            raise
        except Exception:
            # If the data set raised it, the loader continues after this batch, else with it, as after a timeout.
            if self._ends and (not self.workers or self._received > received):
                self.position = self._ends.popleft()
            raise
        self.position = self._ends.popleft()
        return batch

    @property
    def _received(self) -> int:
        # Batches and errors that the iterator has got from workers.
        return int(getattr(self._iterator, "_rcvd_idx", 0))

    def state(self) -> dict[str, Any]:
        return {**super().state(), "seed": self._seed, "fingerprint": self._order.fingerprint(self.epoch)}

    def restore(self, state: dict[str, Any]) -> str:
        self.stop_loading()
        if state.get("seed", self._seed) != self._seed:
            self._seed = int(state["seed"])
            self._order = SampleOrder(self._pattern, self._seed)
        super().restore(state)
        if self._order.fingerprint(self.epoch) != state.get("fingerprint"):
            return f"{NOT_REPLAYED}: the sampler or the data set gives another order than before"
        return REPLAYED

    def check_skip(self, batches: int) -> None:
        entries, size = len(self._order.entries(self.epoch)), self.batch_size or 1
        if batches * size > max(_MOST_SKIPPED_EPOCHS * entries, size):
            raise Rejected(
                f"cannot skip {batches} batches: an epoch has {-(-entries // size)}, "
                f"and at most {_MOST_SKIPPED_EPOCHS} epochs can be skipped"
            )

    def skip(self, batches: int) -> int:
        epoch, position = self.epoch, self.position
        size, added = self.batch_size or 1, 0
        while batches:
            end = len(self._order.entries(epoch))
            here = self._batches_in(max(end - position, 0))
            if end == 0 or (here == 0 and position == 0):
                break
            # Entries that `drop_last` drops do not count, but may be in a batch once batches become smaller.
            stop = min(position + min(batches, here) * size, end)
            left = self.skipped.remaining(epoch, position, stop)
            added += self._batches_in(sum(until - start for start, until in left))
            self.skipped.add(epoch, position, stop)
            batches -= min(batches, here)
            epoch, position = epoch + 1, 0
        self.stop_loading()
        return added

    def _batches_in(self, entries: int) -> int:
        size = self.batch_size or 1
        return entries // size if self._order.drop_last else -(-entries // size)

    def stop_loading(self) -> None:
        iterator, self._iterator, self._loader = self._iterator, None, None
        shut_down_workers(iterator)

    def set_workers(self, count: int) -> None:
        self.stop_loading()
        self.workers = count
        self._begin()  # now, so that an error fails the command, not the training

    def set_batch_size(self, size: int) -> None:
        if self.batch_size is None:
            raise Rejected("the data loader's own batch sampler sets the batch size")
        entries = len(self._order.entries(self.epoch))
        if size > max(entries, self.batch_size):
            raise Rejected(f"a batch would be {size} samples, and an epoch has only {entries}")
        self.stop_loading()
        self.batch_size = size
        self._begin()

    def _begin(self) -> Iterator[Any]:
        self._ends.clear()
        if self._loader is None:
            self._loader = self._build()
        self._iterator = iter(self._loader)
        return self._iterator

    def _build(self) -> DataLoader[Any]:
        pattern = self._pattern
        options: dict[str, Any] = {
            "dataset": _SeededDataset(pattern.dataset, self._seed, self._rank) if self.workers else pattern.dataset,
            "num_workers": self.workers,
            "collate_fn": pattern.collate_fn,
            "pin_memory": pattern.pin_memory,
            "worker_init_fn": pattern.worker_init_fn,
            # A separate generator: iterating must not draw from the training's.
            "generator": torch.Generator().manual_seed(randomness.mixed_seed(self._seed, self._rank)),
        }
        if self.workers:
            options["prefetch_factor"] = pattern.prefetch_factor or 2
            options["persistent_workers"] = pattern.persistent_workers
            options["multiprocessing_context"] = pattern.multiprocessing_context
            options["timeout"] = pattern.timeout
        entries = _Entries(self._upcoming)
        if self._order.has_batches:
            return DataLoader(batch_sampler=entries, **options)
        return DataLoader(batch_size=None, sampler=entries, **options)

    def _upcoming(self) -> Iterator[Any]:
        order, size, epoch = self._order, self.batch_size or 1, self.epoch
        entries = order.entries(epoch)
        batch: list[Any] = []
        begin = end = self.position
        for position, stop in self.skipped.remaining(epoch, self.position, len(entries)):
            while position < stop:
                if not batch:
                    begin = position
                end = min(stop, position + size - len(batch))
                batch.extend(entries[position:end])
                position = end
                if len(batch) == size:
                    # Without a batch size, an entry is what the data set gets: a sample, or the user's batch.
                    yield self._requested(epoch, begin, end, batch[0] if self.batch_size is None else batch)
                    batch = []
        if batch and not order.drop_last:
            yield self._requested(epoch, begin, end, batch)

    def _requested(self, epoch: int, begin: Position, end: Position, entry: Any) -> Any:
        """Record a batch's end; return the sampler's entry."""
        self._ends.append(end)
        if not self.workers:
            return entry
        position = (epoch, begin)  # for `_SeededDataset`
        return [position, *entry] if self._order.has_batches else (position, entry)


class _Entries:
    def __init__(self, upcoming: Callable[[], Iterator[Any]]) -> None:
        self._upcoming = upcoming

    def __iter__(self) -> Iterator[Any]:
        return self._upcoming()


class _SeededDataset:
    """The user's data set, seeded by batch in workers."""

    def __init__(self, dataset: Any, seed: int, rank: int) -> None:
        self.__dict__.update(dataset=dataset, seeds=(seed, rank))

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # during unpickling
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, entry: Any) -> Any:
        position, index = entry
        self._seed(position)
        return self.dataset[index]

    def __getitems__(self, entries: list[Any]) -> Any:
        position, *indices = entries
        self._seed(position)
        dataset = self.dataset
        several = getattr(dataset, "__getitems__", None)
        return several(indices) if several else [dataset[index] for index in indices]

    def _seed(self, position: tuple[int, Position]) -> None:
        if get_worker_info() is not None:
            randomness.seed(randomness.mixed_seed(*self.seeds, *position))
