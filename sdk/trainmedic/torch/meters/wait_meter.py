"""A rank's wait for others, where measurable without synchronization.

`DistributedDataParallel` waits after a rank's last gradient and, with buffers, before the forward pass. Tensor and
pipeline parallelism are not measurable.
"""

from __future__ import annotations

from typing import Any, Iterable, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainmedic.torch.meters.sharded_waits import ShardedWaits
from trainmedic.torch.meters.stopwatches import Stopwatch, measuring_hook, stopwatch_for

_engine: Any = torch.autograd.Variable._execution_engine
_MOST_MISSED = 10  # consecutive steps without the last gradient that was found, until another search
_MOST_SEARCHES = 3  # for a model's last gradient, which may vary


class Waits(Protocol):
    stopwatch: Stopwatch  # also for waits in the loop's own code

    def step_ends(self) -> None: ...

    def close(self) -> None:
        """Remove the hooks and wrappers."""


class WaitMeter:
    """Waits of one rank's ``models``. The first step finds unknown wrappers."""

    def __init__(self, models: Iterable[Any], world_size: int) -> None:
        self._world_size = world_size
        self._is_alone = world_size == 1
        self._waits: list[Waits] = []
        self._unknown: set[int] = set()  # IDs of models whose waits are unknown
        for model in () if self._is_alone else models:
            if isinstance(model, nn.Module) and any(each.requires_grad for each in model.parameters()):
                self._watch(model)

    def add(self, model: nn.Module, waits: Waits) -> None:
        if not self._is_alone:
            self._unknown.discard(id(model))
            self._waits.append(waits)

    def start(self) -> None:
        if self._waits:
            self._waits[0].stopwatch.start()

    def stop(self) -> None:
        if self._waits:
            self._waits[0].stopwatch.stop()

    def step_ends(self) -> None:
        for waits in self._waits:
            waits.step_ends()

    def seconds_per_step(self) -> float | None:
        """Return None if a model's waits are unknown."""
        if self._is_alone:
            return 0.0
        seconds = [waits.stopwatch.seconds_per_step() for waits in self._waits]
        known = [each for each in seconds if each is not None]
        # Several models, as of a GAN, may be trained in separate steps.
        return sum(known) if known and not self._unknown else None

    def close(self) -> None:
        for waits in self._waits:
            waits.close()
        self._waits.clear()

    def _watch(self, model: nn.Module) -> None:
        if isinstance(model, DistributedDataParallel):
            stopwatch = stopwatch_for(next(model.parameters()).device.type)
            if stopwatch is not None:
                self._waits.append(_WrapperWaits(model, stopwatch))
                return
        sharded = ShardedWaits.of(model, self._world_size)
        if sharded is not None:
            self._waits.append(sharded)
            return
        self._unknown.add(id(model))
        # A compiled model would trace the hook into its graph.
        if not isinstance(model, DistributedDataParallel) and not hasattr(model, "_orig_mod"):
            self._find_wrapper_in_first_step(model)

    def _find_wrapper_in_first_step(self, model: nn.Module) -> None:
        def hook(module: nn.Module, inputs: Any) -> None:
            if not module.training:
                return
            handle.remove()
            if id(model) not in self._unknown:
                return  # measured otherwise
            wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
            if wrapper is not None and wrapper.module is module:
                self._unknown.discard(id(model))
                self._watch(wrapper)
            elif (sharded := ShardedWaits.of(model, self._world_size)) is not None:  # sharded later
                self.add(model, sharded)

        handle = model.register_forward_pre_hook(measuring_hook(hook))


class _WrapperWaits:
    def __init__(self, wrapper: DistributedDataParallel, stopwatch: Stopwatch) -> None:
        self._parameters = [each for each in wrapper.module.parameters() if each.requires_grad]
        self.stopwatch = stopwatch
        self._last: Any = None  # parameter whose gradient comes last
        self._last_handle: Any = None  # hook on that parameter
        self._search_handles: list[Any] = []  # hooks on all parameters, during the step that finds it
        self._searches = 0
        self._missed = 0  # consecutive steps without its gradient
        self._was_ready = False  # its gradient came in this step
        self._stop = measuring_hook(stopwatch.stop)
        self._buffer_handles: list[Any] = []
        if wrapper.broadcast_buffers and next(wrapper.module.buffers(), None) is not None:
            # The wrapper broadcasts its buffers between its own and its module's hooks.
            start, stop = measuring_hook(self._start_before_buffers), measuring_hook(self._stop_after_buffers)
            self._buffer_handles.append(wrapper.register_forward_pre_hook(start))
            self._buffer_handles.append(wrapper.module.register_forward_pre_hook(stop))
        self._begin_search()

    def step_ends(self) -> None:
        was_ready, self._was_ready = self._was_ready, False
        self.stopwatch.step_ends(was_ready)
        if self._search_handles:
            if self._last is not None:
                self._end_search()
        elif was_ready:
            self._missed = 0
        else:
            self._missed += 1
            if self._missed == _MOST_MISSED and self._searches < _MOST_SEARCHES:
                self._begin_search()

    def close(self) -> None:
        for handle in (*self._search_handles, *self._buffer_handles, self._last_handle):
            if handle is not None:
                handle.remove()

    def _begin_search(self) -> None:
        if self._last_handle is not None:
            self._last_handle.remove()
        self._last, self._searches, self._missed = None, self._searches + 1, 0
        hook = measuring_hook(self._remember_last)
        self._search_handles = [each.register_post_accumulate_grad_hook(hook) for each in self._parameters]

    def _remember_last(self, parameter: torch.Tensor) -> None:
        self._last = parameter

    def _end_search(self) -> None:
        for handle in self._search_handles:
            handle.remove()
        self._search_handles = []
        hook = measuring_hook(self._start_at_last_gradient)
        self._last_handle = self._last.register_post_accumulate_grad_hook(hook)

    def _start_at_last_gradient(self, parameter: torch.Tensor) -> None:
        self._was_ready = True
        self.stopwatch.start()
        _engine.queue_callback(measuring_hook(self._stop_after_wrapper))

    def _stop_after_wrapper(self) -> None:
        # Queued at the end of the backward pass, it runs after the wrapper's own callback.
        _engine.queue_callback(self._stop)

    def _start_before_buffers(self, module: nn.Module, inputs: Any) -> None:
        if module.training:
            self.stopwatch.start()

    def _stop_after_buffers(self, module: nn.Module, inputs: Any) -> None:
        if module.training:
            self.stopwatch.stop()
