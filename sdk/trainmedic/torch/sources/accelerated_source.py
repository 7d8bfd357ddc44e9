"""The batch sources of loaders that Hugging Face Accelerate has prepared.

Such a loader deals out the batches of another one to the ranks, brings them to the device, and tells Accelerate's
gradient state which one is the last of the epoch. Over an indexed data set all of that is done here, so that any
batch of any epoch can be gone to; the loader's own state, which runs ahead and forgets the sampler's order, is not
used. Other prepared loaders are read again (`AcceleratedReread`): over an ``IterableDataset``, and where one rank
reads for all (``dispatch_batches``), which every rank must then do alike.

Not here: which of them serves a loader (``source_choice``), and Accelerate's part in a step (``accelerated_steps``).
Accelerate is imported already where such a loader exists.
"""

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
    """Batches of a prepared loader over an indexed data set, on this rank. ``seed`` is the same on all ranks."""

    def __init__(self, loader: Any, seed: int, rank: int) -> None:
        super().__init__(loader, seed, rank)
        self._prepared = loader
        self._is_begun = False
        sampler = loader.batch_sampler
        if isinstance(sampler, BatchSamplerShard):
            # Positions count the batches of a rank, so they mean nothing to a loader that is not dealt out.
            self.kind = "Dealt"
            self._dealt_size = int(loader.total_batch_size) // int(sampler.num_processes)

    @property
    def samples_per_batch(self) -> int | None:
        return self._dealt_size if self.kind == "Dealt" else self.batch_size

    def next(self) -> Any:
        loader = self._prepared
        if not self._is_begun:
            loader.begin()
            self._is_begun = True
        try:
            batch = super().next()
        except StopIteration:
            self._end()
            raise
        if self._is_at_end():
            loader.end_of_dataloader = True
        return batch if loader.device is None else send_to_device(batch, loader.device)

    def stop_loading(self) -> None:
        super().stop_loading()
        self._end()

    def _end(self) -> None:
        """Take the loader out of Accelerate's gradient state, where its last batch counts as the end of an epoch."""
        if self._is_begun:
            self._is_begun = False
            self._prepared.end()

    def _is_at_end(self) -> bool:
        order = self._order
        entries = len(order.entries(self.epoch))
        left = sum(stop - start for start, stop in self.skipped.remaining(self.epoch, self.position, entries))
        return left == 0 or (order.drop_last and left < (self.batch_size or 1))


class AcceleratedReread(RereadSource):
    """Batches of any other prepared loader."""

    def __init__(self, loader: Any, most: int) -> None:
        super().__init__(loader, most)
        if getattr(loader, "use_stateful_dataloader", False):
            # It has begun an iterator to ask for its state, which would give the first epoch's batches in any epoch.
            with randomness.preserved():
                iter(loader.base_dataloader)

    def stop_loading(self) -> None:
        if self._iterator is not None:
            self._source.end()
        super().stop_loading()


def source_of_prepared(loader: Any, seed: int, rank: int, reread: int) -> AcceleratedSource | AcceleratedReread:
    """The best batch source for a prepared loader."""
    is_indexed = not isinstance(loader.dataset, IterableDataset) and SampleOrder.is_known(loader)
    # The loaders pass for those of PyTorch, so their real type is looked at.
    if is_indexed and issubclass(type(loader), DataLoaderShard):
        return AcceleratedSource(loader, seed, rank)
    return AcceleratedReread(loader, reread)
