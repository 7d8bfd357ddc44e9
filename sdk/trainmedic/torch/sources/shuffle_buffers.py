"""Samples that a streamed data set buffers outside its state."""

from __future__ import annotations

from collections import deque
from types import GeneratorType
from typing import Any, Dict, Iterator, Mapping, Tuple

from torch.utils.data import IterableDataset

_DEEPEST = 6  # levels of stages, and of containers in a state
# Attributes that hold preceding pipeline stages.
_INNER = ("dataset", "source", "ex_iterable", "_ex_iterable", "ex_iterables", "pipeline", "datasets")
_SHUFFLING_STAGES = ("BufferShuffledExamplesIterable", "detshuffle")  # classes of datasets and WebDataset
_WITH_COMPLETE_STATE = ("streaming",)  # packages: MosaicML's data sets

Buffers = Dict[str, Tuple[int, ...]]  # identities of members, by the variable's name


def is_streamed(loader: Any) -> bool:
    """Return whether the data set is iterable only, with a possibly incomplete state."""
    dataset = getattr(loader, "dataset", None)
    return (
        isinstance(dataset, IterableDataset) and type(dataset).__module__.partition(".")[0] not in _WITH_COMPLETE_STATE
    )


def can_restart_epoch(loader: Any) -> bool:
    """Return whether an empty state restarts the loader's epoch, as in torchdata."""
    return hasattr(loader, "next_iter_state")


def iterator_of(loader: Any) -> Any:
    return getattr(loader, "_iterator", None)


def shuffles(loader: Any) -> bool:
    """Return whether a known stage keeps samples outside the state."""
    return any(_is_shuffling(stage) for stage in _stages(getattr(loader, "dataset", None), _DEEPEST))


class BufferWatch:
    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._before: Buffers = {}  # `_after_first`, but empty until the epoch's second batch
        self._after_first: Buffers = {}  # lists after the epoch's first batch

    def batch_read(self, iterator: Any, is_first: bool) -> None:
        if is_first:  # a list that stays so is a constant, not a buffer
            self._before, self._after_first = {}, _buffers(self._dataset, iterator)
        else:
            self._before = self._after_first

    def held_back(self, iterator: Any, state: Any) -> str:
        """Return the samples that ``state`` lacks, as text, or ""."""
        if shuffles(self._loader):
            return "its shuffle buffer"
        now = _buffers(self._dataset, iterator)
        changed = [name for name, samples in now.items() if samples and samples != self._before.get(name)]
        for name in changed:
            if not _has_sequence(state, len(now[name]), _DEEPEST):
                return f"{len(now[name])} samples in {name}"
        return ""

    @property
    def _dataset(self) -> Any:
        return getattr(self._loader, "dataset", None)


def _is_shuffling(stage: Any) -> bool:
    if type(stage).__name__ in _SHUFFLING_STAGES:
        return True
    # WebDataset's stages call a function of this name.
    function = getattr(stage, "f", None)
    return getattr(function, "__name__", "") == "_shuffle"


def _stages(stage: Any, depth: int) -> Iterator[Any]:
    if stage is None or depth == 0:
        return
    yield stage
    for name in _INNER:
        inner = getattr(stage, "__dict__", {}).get(name)
        for each in inner if isinstance(inner, (list, tuple)) else [inner]:
            if hasattr(each, "__dict__") and not isinstance(each, type):
                yield from _stages(each, depth - 1)


def _buffers(dataset: Any, iterator: Any) -> Buffers:
    fetcher = getattr(iterator, "_dataset_fetcher", None)  # None with worker processes
    if fetcher is None:
        return {}
    found: Buffers = {}
    for holder in (dataset, getattr(fetcher, "dataset_iter", None)):
        _collect(holder, found, _DEEPEST)
    return found


def _collect(holder: Any, found: Buffers, depth: int) -> None:
    if depth == 0 or holder is None:
        return
    if isinstance(holder, GeneratorType):
        frame = holder.gi_frame
        members: Mapping[str, Any] = dict(frame.f_locals) if frame is not None else {}
        members = {name: value for name, value in members.items() if name != "self"}
        _collect(holder.gi_yieldfrom, found, depth - 1)
    else:
        members = getattr(holder, "__dict__", None) or {}
    for name, value in members.items():
        if type(value) in (list, deque):
            found[name] = tuple(map(id, value))
        elif isinstance(value, GeneratorType):
            _collect(value, found, depth - 1)


def _has_sequence(state: Any, length: int, depth: int) -> bool:
    if isinstance(state, Mapping):
        return depth > 0 and any(_has_sequence(each, length, depth - 1) for each in state.values())
    try:
        size = len(state)
    except TypeError:
        return False
    if isinstance(state, (str, bytes)):
        return isinstance(state, bytes) and size >= length  # such as a pickled buffer
    if size == length:
        return True
    is_list = isinstance(state, (list, tuple, deque))
    return is_list and depth > 0 and any(_has_sequence(each, length, depth - 1) for each in state)
