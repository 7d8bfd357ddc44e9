"""Position of a Lightning fit in its data, so that a restart continues with the next batch.

Lightning restarts an epoch of a plain `DataLoader` in another order.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections import deque
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainmedic.torch import randomness
from trainmedic.torch.sources.batch_sources import NOT_REPLAYED, REPLAYED, REREAD
from trainmedic.torch.sources.shuffle_buffers import BufferWatch, can_restart_epoch, is_streamed, iterator_of, shuffles
from trainmedic.trainer.patching import replaced

# Length of combined loaders by the mode of Lightning's ``CombinedLoader``; that of others is the longest one's.
_LENGTHS: Mapping[str, Callable[[Iterable[float]], float]] = {"min_size": min, "sequential": sum}
_EARLIER_STATE = {"place", "began"}  # keys of an earlier release's loader state


class ResumableData:
    """Position of one fit of ``trainer``.

    ``before_draw`` is called before each draw.
    """

    def __init__(self, trainer: Any, before_draw: Callable[[], Any]) -> None:
        self._trainer = trainer
        self._before_draw = before_draw
        # Drawn batches that are not trained on yet, with `before_draw`'s results: one, or two if Lightning reads ahead.
        # If a step draws batches itself, the last ones.
        self._drawn: deque[tuple[Any, Any]] = deque(maxlen=2)
        self._loader: _ResumableLoader | None = None  # None before `wrap`
        self._resume: Mapping[str, Any] | None = None  # position for the next epoch's start
        self._to_skip = 0  # batches, over the ends of epochs
        self._uncounted = 0  # batches skipped since `count_skipped`
        self.skipped = 0  # batches, in the last restart
        self.on_drawn: Callable[[Any, float], None] | None = None  # called with a batch and the seconds of waiting
        self.replayed = ""  # the answer's text about the batches after the checkpoint

    def wrap(self, loaders: Any) -> Any:
        combined = _combined_loader_of(self._trainer)
        if isinstance(loaders, combined):
            self._loader = _loader_class(combined)(loaders.iterables, loaders._mode)
        else:
            self._loader = _loader_class(combined)(loaders, "max_size_cycle")  # as Lightning does
        self._loader.data = self
        return self._loader

    def wrapping(self, source: Any) -> contextlib.AbstractContextManager[None]:
        original = source.train_dataloader

        @functools.wraps(original)
        def train_dataloader() -> Any:
            return self.wrap(original())

        return replaced(source, train_dataloader=train_dataloader)

    def prepare(self, skip_batches: int) -> None:
        self._resume, self._to_skip, self._uncounted, self.skipped = None, skip_batches, 0, 0
        self._drawn.clear()
        self.replayed = f"{NOT_REPLAYED}: the checkpoint does not hold the place in the data; the epoch restarts"

    def state(self) -> dict[str, Any] | None:
        """Return this rank's position; None if unknown."""
        if self._resume is not None:  # nothing drawn yet
            return dict(self._resume)
        if self._loader is None:
            return None
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        ended = progress.is_last_batch or progress.current.ready >= self._trainer.num_training_batches
        if self._loader.began is None and progress.current.ready and not ended:
            return None  # resumed from a checkpoint without the position
        return {
            "place": progress.current.ready,  # batches of this epoch
            "ended": ended,
            "began": self._loader.began,
            "generators": self._loader.generator_states(),
            "workers": self._loader.which_have_workers(),
            "loaders": None if ended else self._loader.loader_states(),
            "held_back": "" if ended else self._loader.held_back(),
        }

    @property
    def to_be_skipped(self) -> int:
        """Batches that this restart skips: whole steps only."""
        group: int = self._trainer.accumulate_grad_batches
        return self.skipped + -(-self._to_skip // group) * group

    def restore(self, state: Mapping[str, Any] | None) -> None:
        self._resume = state

    def count_skipped(self) -> None:
        """Advance Lightning's counters by skipped batches."""
        batches, self._uncounted = self._uncounted, 0
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        for counters in (progress.total, progress.current):
            counters.ready += batches
            counters.started += batches
            counters.processed += batches
            counters.completed += batches

    def take_drawn(self) -> Iterable[tuple[Any, Any]]:
        """Return the oldest untrained batch, with `before_draw`'s result."""
        return [self._drawn.popleft()] if self._drawn else []

    def draw(self, draw: Callable[[], Any]) -> Any:
        before, began = self._before_draw(), time.perf_counter()
        drawn = draw()
        if self.on_drawn is not None:
            self.on_drawn(drawn[0], time.perf_counter() - began)
        self._drawn.append((drawn[0], before))
        return drawn

    @property
    def resumes_at_end(self) -> bool:
        """True if Lightning requests one more batch of an ended epoch, as with ``max_steps``."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        ended = self._resume is not None and self._resume["ended"]
        return bool(ended and progress.current.ready >= self._trainer.num_training_batches)

    def take_resumption(self) -> Mapping[str, Any] | None:
        resume, self._resume = self._resume, None
        return resume

    def take_skip(self, left: float) -> int:
        """Return how many batches to skip, if the epoch has ``left`` more.

        Only whole steps, and never the epoch's last: Lightning must see its end.
        """
        if not self._to_skip:
            return 0
        group: int = self._trainer.accumulate_grad_batches
        wanted = -(-self._to_skip // group)
        batches = int(max(min(wanted, (left - 1) // group), 0)) * group
        self._to_skip = max(self._to_skip - batches, 0)
        return batches

    def note_skipped(self, batches: int) -> None:
        self.skipped += batches
        self._uncounted += batches
        fetcher = self._trainer.fit_loop._data_fetcher
        if fetcher is not None:
            fetcher.fetched += batches


class _ResumableLoader:
    """Part of a ``CombinedLoader`` that resumes at a position.

    It begins at the first batch: before, the sampler does not know its epoch.
    """

    data: ResumableData
    flattened: list[Any]
    limits: list[float] | None
    _mode: str

    began: Mapping[str, Any] | None = None  # random states at the epoch's start
    _has_begun = False
    _states_before_draw: list[Any] | None = None  # of the loaders, if Lightning reads ahead
    _watches: Sequence[BufferWatch] = ()
    _is_first = True  # the next batch is the epoch's first

    def __iter__(self) -> Any:
        self._has_begun = False
        return self

    def __next__(self) -> Any:
        if not self._has_begun:
            self._begin()
            self._has_begun = self._is_first = True
        if self._is_read_ahead:
            self._states_before_draw = _states(self.flattened)
        drawn = self.data.draw(super().__next__)  # type: ignore[misc]
        self._watch()
        return drawn

    def __len__(self) -> int:
        limits = self.limits or [float("inf")] * len(self.flattened)
        lengths = [min(_length(loader), limit) for loader, limit in zip(self.flattened, limits, strict=True)]
        length = _LENGTHS.get(self._mode, max)(lengths)
        if length == float("inf"):
            raise TypeError("the loaders have no length")
        return int(length)

    def reset(self) -> None:
        self._has_begun = False
        super().reset()  # type: ignore[misc]

    def loader_states(self) -> list[Any] | None:
        """Return states after the last used batch, or None."""
        return self._states_before_draw if self._is_read_ahead else _states(self.flattened)

    def held_back(self) -> str:
        """Return the buffered samples that `loader_states` lack, as text, or ""."""
        states = self.loader_states() or []
        watched = zip(self._watches, self.flattened, states, strict=False)
        return next(filter(None, (each.held_back(iterator_of(loader), state) for each, loader, state in watched)), "")

    def generator_states(self) -> list[Any]:
        return [generator.get_state() for generator in _generators(self.flattened)]

    def which_have_workers(self) -> list[bool]:
        return [getattr(loader, "_iterator", None) is not None for loader in self.flattened]

    def _load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """Load rank 0's states, unless `ResumableData` has this rank's."""
        states = [state for state in states if set(state) != _EARLIER_STATE]
        if self.data._resume is None:
            super()._load_state_dicts(states)  # type: ignore[misc]

    def _watch(self) -> None:
        if self._is_first or len(self._watches) != len(self.flattened):
            self._watches = [BufferWatch(loader) for loader in self.flattened]
        for watch, loader in zip(self._watches, self.flattened, strict=True):
            if is_streamed(loader):
                watch.batch_read(iterator_of(loader), self._is_first)
        self._is_first = False

    @property
    def _is_read_ahead(self) -> bool:
        """True if Lightning reads one batch ahead, to find the end."""
        return self._epoch_length == float("inf")

    @functools.cached_property
    def _epoch_length(self) -> float:
        return _length(self)

    def _begin(self) -> None:
        if self.data.resumes_at_end:
            raise StopIteration
        resume = self.data.take_resumption()
        position = 0 if resume is None or resume["ended"] else resume["place"]
        if not position:
            if resume is not None:
                self._restore_random(randomness.capture(), resume["generators"], resume["workers"])
                self.data.replayed = REPLAYED
            self.began = {
                "random": randomness.capture(),
                "generators": self.generator_states(),
                "workers": self.which_have_workers(),
            }
            super().__iter__()  # type: ignore[misc]
        else:
            assert resume is not None
            self._resume_at(position, resume)
        self.data.note_skipped(self._read(self.data.take_skip(self._epoch_length - position)))

    def _resume_at(self, position: int, resume: Mapping[str, Any]) -> None:
        now, self.began = randomness.capture(), resume["began"]
        has_states = resume["loaders"] is not None and len(resume["loaders"]) == len(self.flattened)
        can_load = has_states and all(_has_state(loader) for loader in self.flattened)
        held_back = resume.get("held_back") or ("its shuffle buffer" if any(map(shuffles, self.flattened)) else "")
        if can_load and (not held_back or position > REREAD or not all(map(can_restart_epoch, self.flattened))):
            for loader, state in zip(self.flattened, resume["loaders"], strict=True):
                loader.load_state_dict(state)
            super().__iter__()  # type: ignore[misc]
            self.data.replayed = f"{NOT_REPLAYED}: the state of a data set lacks {held_back}" if held_back else REPLAYED
        else:
            for loader in self.flattened if can_load else ():
                loader.load_state_dict({})  # so that it restarts the epoch
            # A loader draws the order when iteration begins: the same for the same random state.
            self._restore_random(**resume["began"])
            super().__iter__()  # type: ignore[misc]
            self.data.replayed = self._read_up_to(position)
        randomness.restore(now)

    def _read_up_to(self, position: int) -> str:
        """Drop the batches before ``position``; return the answer's text."""
        is_indexed = all(_is_indexed(loader) for loader in self.flattened)
        if any(isinstance(loader, Iterator) for loader in self.flattened):
            return f"{NOT_REPLAYED}: an iterator cannot go back"
        if position > REREAD and not is_indexed:
            return f"{NOT_REPLAYED}: the epoch restarts: more than {REREAD} batches would have to be read again"
        read = self._read(position)
        if read < position:
            return f"{NOT_REPLAYED}: the source has only {read} batches this time"
        return REPLAYED if is_indexed else f"{REPLAYED}, if the source repeats itself: {read} were read again"

    def _restore_random(self, random: Mapping[str, Any], generators: list[Any], workers: list[bool]) -> None:
        for loader, had_workers in zip(self.flattened, workers, strict=False):
            # A loader that reuses its workers draws one number less.
            if had_workers and loader._iterator is None:
                iter(loader)
        for generator, state in zip(_generators(self.flattened), generators, strict=False):
            generator.set_state(state)
        randomness.restore(random)

    def _read(self, batches: int) -> int:
        for read in range(batches):
            try:
                super().__next__()  # type: ignore[misc]
            except StopIteration:
                return read
        return batches


def _combined_loader_of(trainer: Any) -> Any:
    library = type(trainer.fit_loop).__module__.partition(".loops")[0]
    return importlib.import_module(f"{library}.utilities.combined_loader").CombinedLoader


@functools.cache
def _loader_class(combined: Any) -> Any:
    return type("ResumableLoader", (_ResumableLoader, combined), {})


def _has_state(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def _states(loaders: list[Any]) -> list[Any] | None:
    if not all(_has_state(loader) for loader in loaders):
        return None
    return [loader.state_dict() for loader in loaders]


def _length(loader: Any) -> float:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # raised by loaders without a length
        return float("inf")


def _generators(loaders: list[Any]) -> list[torch.Generator]:
    generators: list[torch.Generator] = []
    for loader in loaders:
        sampler = getattr(loader, "sampler", None)
        inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        for part in (loader, sampler, inner):
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator) and all(generator is not each for each in generators):
                generators.append(generator)
    return generators


def _is_indexed(loader: Any) -> bool:
    if isinstance(loader, DataLoader):
        return not isinstance(loader.dataset, IterableDataset)
    return isinstance(loader, (list, tuple))
