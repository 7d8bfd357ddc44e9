"""Samples that a streamed data set holds back, such as in a shuffle buffer, and that its state does not contain.

A data set that shuffles a stream fills a buffer and yields from it. Its ``state_dict`` often says how far the stream
was read, and not what lies in the buffer: Hugging Face's data sets fill it again, with other samples. Then a loader
goes on from its state with other batches. `held_back` knows Hugging Face's and WebDataset's shuffling by their stages,
and sees the buffers of others while it watches them (`BufferWatch`), where no worker process has them.

Who calls it: ``stateful_source`` and Lightning's loaders. Not here: how a source comes to a position without the state.
"""

from __future__ import annotations

from collections import deque
from types import GeneratorType
from typing import Any, Dict, Iterator, Mapping, Tuple

from torch.utils.data import IterableDataset

_DEEPEST = 6
_INNER = ("dataset", "source", "ex_iterable", "_ex_iterable", "ex_iterables", "pipeline", "datasets")
"""The attributes by which stages of data pipelines hold the stages before them."""
_SHUFFLING = ("BufferShuffledExamplesIterable", "detshuffle")
_EXACT = ("streaming",)  # MosaicML's data sets, whose state is complete

Buffers = Dict[str, Tuple[int, ...]]
"""The identities of the samples in each buffer, by a name for people."""


def is_streamed(loader: Any) -> bool:
    """Return whether the loader has a data set that can only be iterated over, and whose state may be incomplete."""
    dataset = getattr(loader, "dataset", None)
    return isinstance(dataset, IterableDataset) and type(dataset).__module__.partition(".")[0] not in _EXACT


def begins_again(loader: Any) -> bool:
    """Return whether an empty state lets the loader begin an epoch again, as torchdata's does."""
    return hasattr(loader, "next_iter_state")


def iterator_of(loader: Any) -> Any:
    """Return the present iterator of a loader that knows it, such as torchdata's; None for others."""
    return getattr(loader, "_iterator", None)


def shuffles(loader: Any) -> bool:
    """Return whether a stage of the loader's data set is known to shuffle in a buffer that its state lacks."""
    return any(_is_shuffling(stage) for stage in _stages(getattr(loader, "dataset", None), _DEEPEST))


class BufferWatch:
    """The buffers of one loader's data set, which change while it is read; lists that do not change are its data."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._before: Buffers = {}
        self._after_first: Buffers = {}

    def batch_read(self, iterator: Any, is_first: bool) -> None:
        """Take note that a batch was read from the loader's ``iterator``, and of the buffers after its first one."""
        if is_first:  # at this one a buffer and a list that stays look the same
            self._before, self._after_first = {}, _buffers(self._dataset, iterator)
        else:
            self._before = self._after_first

    def held_back(self, iterator: Any, state: Any) -> str:
        """Return what the data set holds back that ``state`` lacks; empty where nothing is seen."""
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
    if type(stage).__name__ in _SHUFFLING:
        return True
    # WebDataset's stages are objects that call a function of this name.
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
    """The lists and queues in the data set, in its iterator, and in the generators that this consists of."""
    fetcher = getattr(iterator, "_dataset_fetcher", None)  # None where worker processes read
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
    """Return whether a sequence or tensor of that length is in ``state``."""
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
