"""Sources for loaders and data sets that keep their position."""

from __future__ import annotations

import inspect
from collections import deque
from typing import Any, Iterator

import torch

from trainmedic.recovery.fingerprints import Fingerprint, fingerprint, read
from trainmedic.torch import randomness
from trainmedic.torch.sources.batch_sources import (
    NOT_REPLAYED,
    REPLAYED,
    BatchSource,
    IteratedSource,
    replayed_after_rereading,
    set_epoch,
)
from trainmedic.torch.sources.shuffle_buffers import BufferWatch, shuffles

_LAST = 4  # batches before the position, to compare after reading the epoch again


class StatefulSource(IteratedSource):
    """Batches of a loader that keeps its position, itself or in its data set (``keeper``).

    Each iterator starts with its original random numbers.
    """

    kind = "Stateful"

    def __init__(self, loader: Any, keeper: Any) -> None:
        super().__init__(loader)
        self._keeper = keeper
        # A data set may be at its end between epochs and would stay there.
        self._initial_state = keeper.state_dict() if keeper is not loader else None
        self._random_at_start: dict[str, Any] | None = None  # of the present iterator
        # The restored position is inside an epoch. The checkpoint's generators are already past the epoch's first
        # random numbers.
        self._was_inside_epoch = False

    def state(self) -> dict[str, Any]:
        before = randomness.capture()
        loader_state = self._keeper.state_dict()
        # The loader may have begun to iterate for its state; drawn random numbers show that.
        if self._random_at_start is None and not torch.equal(before["torch"], torch.get_rng_state()):
            self._random_at_start = before
        is_inside_epoch = self._random_at_start is not None
        return {
            **super().state(),
            "loader": loader_state,
            "begun": is_inside_epoch,
            "at_start": self._random_at_start,
        }

    def restore(self, state: dict[str, Any]) -> str:
        super().restore(state)
        self.stop_loading()
        self._was_inside_epoch = state.get("begun", False)
        self._random_at_start = state.get("at_start")
        self._set_epoch()
        is_at_start = self._initial_state is not None and self.position == 0
        self._keeper.load_state_dict(self._initial_state if is_at_start else state["loader"])
        return REPLAYED

    def fetch(self) -> Any:
        try:
            return super().fetch()
        except StopIteration:
            self._random_at_start = None
            raise

    def _set_epoch(self) -> None:
        set_epoch(self._keeper, self.epoch)
        dataset = getattr(self._source, "dataset", None)
        if hasattr(dataset, "next_epoch"):
            set_epoch(dataset, self.epoch)

    def begin_epoch(self) -> Iterator[Any]:
        self._set_epoch()
        if not self._was_inside_epoch:
            if self._random_at_start is None:
                self._random_at_start = randomness.capture()
            return iter(self._source)
        self._was_inside_epoch = False
        with randomness.preserved():
            if self._random_at_start is not None:
                randomness.restore(self._random_at_start)
            return iter(self._source)


class BufferedSource(StatefulSource):
    """Batches of a streamed data set that may buffer samples.

    If its state lacks them, up to ``most_reread`` batches are read again.
    """

    def __init__(self, loader: Any, keeper: Any, most_reread: int) -> None:
        super().__init__(loader, keeper)
        self._most_reread = most_reread
        self._watch = BufferWatch(loader)
        self._last: deque[Fingerprint] = deque(maxlen=_LAST)
        dataset = loader.dataset
        # The data set in this process continues from its loaded state.
        must_reset = keeps_position(dataset) and not loader.num_workers
        self._data_set_at_start = dataset.state_dict() if must_reset else None

    def state(self) -> dict[str, Any]:
        state = super().state()
        held_back = self._watch.held_back(self._iterator, state["loader"]) if self.position else ""
        return {**state, "held_back": held_back, "last": [read(each) for each in self._last]}

    def fetch(self) -> Any:
        is_first = self._iterator is None
        batch = super().fetch()
        self._watch.batch_read(self._iterator, is_first)
        if self.position == 1:
            self._last.clear()
        self._last.append(fingerprint(batch))
        return batch

    def restore(self, state: dict[str, Any]) -> str:
        held_back = state.get("held_back") or ("its shuffle buffer" if shuffles(self._source) else "")
        self._last = deque(state.get("last", ()), maxlen=_LAST)
        position = state["place"]
        if not held_back or position == 0:
            return self._restore_state(state)
        if position > self._most_reread:
            self._restore_state(state)
            return (
                f"{NOT_REPLAYED}: more than {self._most_reread} would have to be read again, because the state of the "
                f"data set lacks {held_back}; it goes on from where it was, and those samples come otherwise"
            )
        BatchSource.restore(self, state)
        self.stop_loading()
        self._was_inside_epoch, self._random_at_start = False, state.get("at_start")
        self._go_to_epoch_start()
        return self._read_again(position)

    def _restore_state(self, state: dict[str, Any]) -> str:
        data = super().restore(state)
        if self._source.num_workers and data == REPLAYED and self.position:
            return f"{data}, if the state of the data set holds all that its workers hold back"
        return data

    def _go_to_epoch_start(self) -> None:
        if self._keeper is self._source:
            self._source.load_state_dict({})
        if self._data_set_at_start is not None:
            self._source.dataset.load_state_dict(self._data_set_at_start)
        self._set_epoch()

    def _set_epoch(self) -> None:
        set_epoch(self._source.dataset, self.epoch)

    def _read_again(self, position: int) -> str:
        expected, self._last = [read(each) for each in self._last], deque(maxlen=_LAST)
        with randomness.preserved():
            if self._random_at_start is not None:
                randomness.restore(self._random_at_start)
            self._iterator = iter(self._source)
            for number in range(position):
                try:
                    self._last.append(fingerprint(next(self._iterator)))
                except StopIteration:
                    self._iterator = None
                    return f"{NOT_REPLAYED}: the source has only {number} batches this time"
                self._watch.batch_read(self._iterator, number == 0)
        if expected and expected != [read(each) for each in self._last]:
            return f"{NOT_REPLAYED}: the source gives others when it is read again"
        return replayed_after_rereading(position)


def keeps_position(loader: Any) -> bool:
    """Return whether its state needs no argument; MosaicML's data sets need the position."""
    state_dict = getattr(loader, "state_dict", None)
    if not callable(state_dict) or not callable(getattr(loader, "load_state_dict", None)):
        return False
    parameters = inspect.signature(state_dict).parameters.items()
    needed = [name for name, parameter in parameters if parameter.default is parameter.empty]
    return all(name in ("args", "kwargs") for name in needed)
