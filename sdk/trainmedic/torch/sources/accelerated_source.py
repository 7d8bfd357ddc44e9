"""Batch sources for loaders prepared by Hugging Face Accelerate, whose own state is ahead of the batches in use."""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from accelerate.utils import send_to_device
from torch.utils.data import IterableDataset

from trainmedic.torch import randomness
from trainmedic.torch.sources.batch_sources import RereadSource
from trainmedic.torch.sources.indexed_source import IndexedSource
from trainmedic.torch.sources.sample_order import SampleOrder


class AcceleratedSource(IndexedSource):
    """A prepared loader's batches on this rank. ``seed`` is equal on all ranks."""

    def __init__(self, loader: Any, seed: int, rank: int) -> None:
        super().__init__(loader, seed, rank)
        self._prepared = loader
        self._has_begun_epoch = False
        sampler = loader.batch_sampler
        if isinstance(sampler, BatchSamplerShard):
            # Positions count this rank's batches, so they do not fit a loader that is not distributed.
            self.kind = "Dealt"
            # Samples per batch of this rank.
            self._dealt_size = int(loader.total_batch_size) // int(sampler.num_processes)

    @property
    def samples_per_batch(self) -> int | None:
        return self._dealt_size if self.kind == "Dealt" else self.batch_size

    def next(self) -> Any:
        loader = self._prepared
        if not self._has_begun_epoch:
            loader.begin()
            self._has_begun_epoch = True
        try:
            batch = super().next()
        except StopIteration:
            self._end_epoch()
            raise
        if self._is_last_batch():
            loader.end_of_dataloader = True  # Accelerate then ends the accumulation
        return batch if loader.device is None else send_to_device(batch, loader.device)

    def stop_loading(self) -> None:
        super().stop_loading()
        self._end_epoch()

    def _end_epoch(self) -> None:
        if self._has_begun_epoch:
            self._has_begun_epoch = False
            self._prepared.end()

    def _is_last_batch(self) -> bool:
        order = self._order
        entries = len(order.entries(self.epoch))
        left = sum(stop - start for start, stop in self.skipped.remaining(self.epoch, self.position, entries))
        return left == 0 or (order.drop_last and left < (self.batch_size or 1))


class AcceleratedReread(RereadSource):
    def __init__(self, loader: Any, most_reread: int) -> None:
        super().__init__(loader, most_reread)
        if getattr(loader, "use_stateful_dataloader", False):
            # Accelerate's query for its state has begun an iterator, which would return the first epoch's batches in
            # any epoch.
            with randomness.preserved():
                iter(loader.base_dataloader)

    def stop_loading(self) -> None:
        if self._iterator is not None:
            self._source.end()
        super().stop_loading()


def source_of_prepared(loader: Any, seed: int, rank: int, reread: int) -> AcceleratedSource | AcceleratedReread:
    is_indexed = not isinstance(loader.dataset, IterableDataset) and SampleOrder.is_known(loader)
    # The loaders claim PyTorch's class, so check the real type.
    if is_indexed and issubclass(type(loader), DataLoaderShard):
        return AcceleratedSource(loader, seed, rank)
    return AcceleratedReread(loader, reread)
