"""Which batch source serves a user's loader; the best one that it allows, in this order:

- a loader that Hugging Face Accelerate has prepared: `trainmedic.torch.sources.accelerated_source`;
- a loader that keeps its own position (``state_dict`` and ``load_state_dict``, such as torchdata's
  ``StatefulDataLoader``): `StatefulSource`, exact; over streamed data, or where the streamed data set itself keeps it,
  `BufferedSource`, which reads again where the state lacks samples that are held back;
- a `DataLoader` over an indexed data set: `IndexedSource`, exact;
- a sequence of batches, or anything that has ``__getitem__`` only: `SequenceSource`, exact;
- anything else that can be iterated over again, such as a `DataLoader` over an `IterableDataset`: `RereadSource`,
  which begins the epoch again and reads up to the position, if that is not too far;
- an iterator, which can only go on: `IteratorSource`;
- a function that draws a batch whenever it is called: `DrawnSource`, exact if it draws from random numbers alone.
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
from trainmedic.torch.sources.shuffle_buffers import begins_again, is_streamed
from trainmedic.torch.sources.stateful_source import BufferedSource, StatefulSource, keeps_position


def batch_source_for(loader: Any, seed: int | None, rank: int, reread: int = REREAD) -> BatchSource:
    """The best batch source for a user's loader; without ``seed`` its order follows from PyTorch's own.

    Raises ConfigurationError where nothing can be read from it.
    """
    order_seed = torch.initial_seed() if seed is None else seed
    if is_prepared_by_accelerate(loader):
        from trainmedic.torch.sources.accelerated_source import source_of_prepared

        return source_of_prepared(loader, order_seed, rank, reread)
    if keeps_position(loader):
        if is_streamed(loader) and begins_again(loader):
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
            f"loader: {loader.__name__} gives no batch when it is called: give what it makes, which is an iterator and "
            "only goes on, or an object whose __iter__ begins anew"
        )
    if callable(loader):
        return DrawnSource(loader, order_seed, rank)
    raise ConfigurationError(f"loader: no batches can be read from a {type(loader).__name__}")


def is_prepared_by_accelerate(loader: Any) -> bool:
    """Whether it is a loader that Hugging Face Accelerate has prepared, found out without importing Accelerate."""
    return any(kind.__module__ == "accelerate.data_loader" for kind in type(loader).__mro__)
