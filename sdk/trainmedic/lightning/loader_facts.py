"""What can be told of a data loader, whoever made it: whether it keeps its place, its length, its own generators.

`ResumableData` goes by it. Not here: what follows for a rollback.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset


def keeps_its_place(loader: Any) -> bool:
    """Whether it has a state from which it goes on where it was."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def places(loaders: list[Any]) -> list[Any] | None:
    """The loaders' own states; None where they do not all keep one."""
    if not all(keeps_its_place(loader) for loader in loaders):
        return None
    return [loader.state_dict() for loader in loaders]


def length(loader: Any) -> float:
    """How many batches its epoch has; infinity where it does not say."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # what a loader without a length raises
        return float("inf")


def generators(loaders: list[Any]) -> list[torch.Generator]:
    """The generators that the loaders, or their samplers, have of their own."""
    own: list[torch.Generator] = []
    for loader in loaders:
        sampler = getattr(loader, "sampler", None)
        inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        for part in (loader, sampler, inner):
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator) and all(generator is not each for each in own):
                own.append(generator)
    return own


def is_indexed(loader: Any) -> bool:
    """Whether its epoch can be read again and is the same then, given the same random numbers."""
    if isinstance(loader, DataLoader):
        return not isinstance(loader.dataset, IterableDataset)
    return isinstance(loader, (list, tuple))
