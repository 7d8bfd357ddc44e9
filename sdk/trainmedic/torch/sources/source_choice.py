"""Choice of the batch source for a loader, in this order:

- prepared by Accelerate: see `accelerated_source`
- with its own state, such as ``StatefulDataLoader``: `StatefulSource`; `BufferedSource` for a restartable stream
- `DataLoader` over an indexed data set in a known order: `IndexedSource`
- `DataLoader` without workers over an `IterableDataset` that keeps its position: `BufferedSource`
- other `DataLoader`: `RereadSource`
- iterator, which cannot go back: `IteratorSource`
- sequence: `SequenceSource`
- other iterable: `RereadSource`
- function: `DrawnSource`
"""

from __future__ import annotations

import inspect
from typing import Any, Iterator

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainmedic.errors import ConfigurationError
from trainmedic.torch.sources.batch_sources import (
    REREAD,
    BatchSource,
    IteratorSource,
    RereadSource,
    SequenceSource,
)
from trainmedic.torch.sources.drawn_source import DrawnSource
from trainmedic.torch.sources.indexed_source import IndexedSource
from trainmedic.torch.sources.sample_order import SampleOrder
from trainmedic.torch.sources.shuffle_buffers import can_restart_epoch, is_streamed
from trainmedic.torch.sources.stateful_source import BufferedSource, StatefulSource, keeps_position


def batch_source_for(loader: Any, seed: int | None, rank: int, reread: int = REREAD) -> BatchSource:
    """Return the source, which reads at most `reread` batches again. ``seed`` defaults to PyTorch's.

    Raises ConfigurationError.
    """
    order_seed = torch.initial_seed() if seed is None else seed
    if is_prepared_by_accelerate(loader):
        from trainmedic.torch.sources.accelerated_source import source_of_prepared

        return source_of_prepared(loader, order_seed, rank, reread)
    if keeps_position(loader):
        if is_streamed(loader) and can_restart_epoch(loader):
            return BufferedSource(loader, loader, reread)
        return StatefulSource(loader, loader)
    if isinstance(loader, DataLoader):
        dataset = loader.dataset
        if isinstance(dataset, IterableDataset):
            if loader.num_workers == 0 and keeps_position(dataset):
                return BufferedSource(loader, dataset, reread)
            return RereadSource(loader, reread)
        if type(loader).__iter__ is DataLoader.__iter__ and SampleOrder.is_known(loader):
            return IndexedSource(loader, order_seed, rank)
        return RereadSource(loader, reread)
    if isinstance(loader, Iterator):
        return IteratorSource(loader)
    if hasattr(loader, "__getitem__") and (isinstance(loader, (list, tuple)) or not hasattr(loader, "__iter__")):
        return SequenceSource(loader)
    if hasattr(loader, "__iter__"):
        return RereadSource(loader, reread)
    if inspect.isgeneratorfunction(loader) or isinstance(loader, type):
        raise ConfigurationError(
            f"loader: {loader.__name__} returns no batch when called: pass the iterator that it makes, which cannot "
            "go back, or an object whose __iter__ starts afresh"
        )
    if callable(loader):
        return DrawnSource(loader, order_seed, rank)
    raise ConfigurationError(f"loader: no batches can be read from a {type(loader).__name__}")


def is_prepared_by_accelerate(loader: Any) -> bool:
    # Without importing Accelerate.
    return any(kind.__module__ == "accelerate.data_loader" for kind in type(loader).__mro__)
