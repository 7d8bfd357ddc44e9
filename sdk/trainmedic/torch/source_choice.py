"""Which batch source serves a user's loader; the best one that it allows, in this order:

- a loader that keeps its own position (``state_dict`` and ``load_state_dict``, such as torchdata's
  ``StatefulDataLoader``): `StatefulSource`, exact;
- a `DataLoader` over an indexed data set: `IndexedSource`, exact;
- a sequence of batches, or anything that has ``__getitem__`` only: `SequenceSource`, exact;
- anything else that can be iterated over again, such as a `DataLoader` over an `IterableDataset`: `RereadSource`,
  which begins the epoch again and reads up to the position, if that is not too far;
- an iterator, which can only go on: `IteratorSource`.
"""

from __future__ import annotations

from typing import Any, Iterator

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainmedic.errors import ConfigurationError
from trainmedic.torch.batch_sources import (
    REREAD,
    BatchSource,
    IteratorSource,
    RereadSource,
    SequenceSource,
    StatefulSource,
)
from trainmedic.torch.indexed_source import IndexedSource
from trainmedic.torch.sample_order import SampleOrder


def batch_source_for(loader: Any, seed: int | None, rank: int, reread: int = REREAD) -> BatchSource:
    """The best batch source for a user's loader; without ``seed`` its order follows from PyTorch's own.

    Raises ConfigurationError where nothing can be read from it.
    """
    if _keeps_its_position(loader):
        return StatefulSource(loader, loader)
    if isinstance(loader, DataLoader):
        dataset = loader.dataset
        if isinstance(dataset, IterableDataset):
            if loader.num_workers == 0 and _keeps_its_position(dataset):
                return StatefulSource(loader, dataset)
            return RereadSource(loader, reread)
        if type(loader).__iter__ is DataLoader.__iter__ and SampleOrder.is_known(loader):
            return IndexedSource(loader, torch.initial_seed() if seed is None else seed, rank)
        return RereadSource(loader, reread)
    if isinstance(loader, Iterator):
        return IteratorSource(loader)
    if hasattr(loader, "__getitem__") and (isinstance(loader, (list, tuple)) or not hasattr(loader, "__iter__")):
        return SequenceSource(loader)
    if hasattr(loader, "__iter__"):
        return RereadSource(loader, reread)
    raise ConfigurationError(f"loader: no batches can be read from a {type(loader).__name__}")


def _keeps_its_position(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))
