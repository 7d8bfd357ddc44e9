"""How long a rank waits for the other ranks in its steps, where that can be known without synchronising anything.

`DistributedDataParallel` waits in two places. Its backward pass ends when the gradients of all ranks are summed; the
rank itself is done when the last of its own gradients is there. And where the model has buffers, its forward pass
begins with those of rank 0. In both the rank waits for the slowest one, so that the time in between is not its own. The
time that the sum itself takes counts as waiting as well; it is alike on all ranks.

FSDP waits in every layer, and ``sharded_waits`` measures it there. A DeepSpeed engine adds its own measurement
(`WaitMeter.add`). Tensor and pipeline parallelism wait in places that cannot be observed, so nothing is reported.

Who calls it: the integrations. Not here: what follows from it (``trainmedic.job.pace``).
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Callable, Iterable, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainmedic.torch.meters.sharded_waits import ShardedWaits
from trainmedic.torch.meters.stopwatches import CudaStopwatch, HostStopwatch, Stopwatch

log = logging.getLogger("trainmedic")

_engine: Any = torch.autograd.Variable._execution_engine
_MOST_MISSED = 10
_MOST_LEARNED = 3
"""Times that a model's last gradient is looked for, which costs a call for each parameter. Where it is another one each
time, no hook tells when all are there."""


class Waits(Protocol):
    """Measurement of one model's waiting, for one kind of distribution."""

    stopwatch: Stopwatch
    """The stopwatch, which also counts a wait of the loop itself."""

    def step_ends(self) -> None:
        """End the current step."""

    def seconds_per_step(self) -> float | None:
        """Return the mean of the known steps since the last call. None if there are none."""

    def close(self) -> None:
        """Remove what was attached to the model."""


class WaitMeter:
    """Measures the waiting of one rank. ``models`` are those that it trains, wrapped or not; others are left alone.

    A model that is not wrapped yet, or whose wrapper is not given, is asked for it in its first training step.
    """

    def __init__(self, models: Iterable[Any], world_size: int) -> None:
        self._world_size = world_size
        self._is_alone = world_size == 1
        self._waits: list[Waits] = []
        self._unknown: set[int] = set()  # the models of which it is not known how they wait, by id
        for model in () if self._is_alone else models:
            if isinstance(model, nn.Module) and any(each.requires_grad for each in model.parameters()):
                self._watch(model)

    def add(self, model: nn.Module, waits: Waits) -> None:
        """Measure the waiting of this model with `waits`."""
        if not self._is_alone:
            self._unknown.discard(id(model))
            self._waits.append(waits)

    def start(self) -> None:
        """The loop is about to wait for other ranks by itself."""
        if self._waits:
            self._waits[0].stopwatch.start()

    def stop(self) -> None:
        """It has waited."""
        if self._waits:
            self._waits[0].stopwatch.stop()

    def step_ends(self) -> None:
        """A step is complete. Called for each, also for those that are not reported."""
        for waits in self._waits:
            waits.step_ends()

    def seconds_per_step(self) -> float | None:
        """The mean waiting of the steps since the last call, as far as it is known; None where it is not."""
        if self._is_alone:
            return 0.0
        seconds = [waits.seconds_per_step() for waits in self._waits]
        known = [each for each in seconds if each is not None]
        # Of several models, such as those of a GAN, each may be trained in steps of its own.
        return sum(known) if known and not self._unknown else None

    def close(self) -> None:
        """Take the hooks off the models."""
        for waits in self._waits:
            waits.close()
        self._waits.clear()

    def _watch(self, model: nn.Module) -> None:
        if isinstance(model, DistributedDataParallel):
            stopwatch = _stopwatch_for(next(model.parameters()).device)
            if stopwatch is not None:
                self._waits.append(_WrapperWaits(model, stopwatch))
                return
        sharded = ShardedWaits.of(model, self._world_size)
        if sharded is not None:
            self._waits.append(sharded)
            return
        self._unknown.add(id(model))
        # What is compiled would take a hook into its graph.
        if not isinstance(model, DistributedDataParallel) and not hasattr(model, "_orig_mod"):
            self._ask_for_wrapper(model)

    def _ask_for_wrapper(self, model: nn.Module) -> None:
        def hook(module: nn.Module, inputs: Any) -> None:
            if not module.training:
                return
            handle.remove()
            if id(model) not in self._unknown:
                return  # another measurement has it
            wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
            if wrapper is not None and wrapper.module is module:
                self._unknown.discard(id(model))
                self._watch(wrapper)
            elif (sharded := ShardedWaits.of(model, self._world_size)) is not None:  # it is sharded by now
                self.add(model, sharded)

        handle = model.register_forward_pre_hook(_unless_it_fails(hook))


class _WrapperWaits:
    """The waiting of one `DistributedDataParallel`."""

    def __init__(self, wrapper: DistributedDataParallel, stopwatch: Stopwatch) -> None:
        self._parameters = [each for each in wrapper.module.parameters() if each.requires_grad]
        self.stopwatch = stopwatch
        self._last: Any = None
        self._last_handle: Any = None  # of the hook on that parameter, once it is learned
        self._learning: list[Any] = []  # the handles of the hooks by which it is learned
        self._learned = 0
        self._missed = 0  # steps in a row without a sign of it
        self._was_ready = False
        self._stop = _unless_it_fails(stopwatch.stop)
        self._buffer_handles: list[Any] = []
        if wrapper.broadcast_buffers and next(wrapper.module.buffers(), None) is not None:
            due, there = _unless_it_fails(self._buffers_are_due), _unless_it_fails(self._buffers_are_there)
            self._buffer_handles.append(wrapper.register_forward_pre_hook(due))
            self._buffer_handles.append(wrapper.module.register_forward_pre_hook(there))
        self._learn()

    def step_ends(self) -> None:
        was_ready, self._was_ready = self._was_ready, False
        self.stopwatch.step_ends(was_ready)
        if self._learning:
            if self._last is not None:
                self._stop_learning()
        elif was_ready:
            self._missed = 0
        else:
            self._missed += 1
            if self._missed == _MOST_MISSED and self._learned < _MOST_LEARNED:
                self._learn()

    def seconds_per_step(self) -> float | None:
        return self.stopwatch.seconds_per_step()

    def close(self) -> None:
        for handle in (*self._learning, *self._buffer_handles, self._last_handle):
            if handle is not None:
                handle.remove()

    # --- the last gradient ------------------------------------------------------------------------------

    def _learn(self) -> None:
        """For one step, look which gradient comes last."""
        if self._last_handle is not None:
            self._last_handle.remove()
        self._last, self._learned, self._missed = None, self._learned + 1, 0
        note = _unless_it_fails(self._note)
        self._learning = [each.register_post_accumulate_grad_hook(note) for each in self._parameters]

    def _note(self, parameter: torch.Tensor) -> None:
        self._last = parameter

    def _stop_learning(self) -> None:
        for handle in self._learning:
            handle.remove()
        self._learning = []
        hook = _unless_it_fails(self._gradients_are_ready)
        self._last_handle = self._last.register_post_accumulate_grad_hook(hook)

    def _gradients_are_ready(self, parameter: torch.Tensor) -> None:
        """This rank's gradients are there. The wrapper calls back when the backward pass ends, to wait for the sums."""
        self._was_ready = True
        self.stopwatch.start()
        _engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        # This may come before the wrapper's own callback. What is queued now comes after it.
        _engine.queue_callback(self._stop)

    # --- buffers ----------------------------------------------------------------------------------------

    def _buffers_are_due(self, module: nn.Module, inputs: Any) -> None:
        if module.training:
            self.stopwatch.start()

    def _buffers_are_there(self, module: nn.Module, inputs: Any) -> None:
        if module.training:
            self.stopwatch.stop()


def _stopwatch_for(device: torch.device) -> Stopwatch | None:
    if device.type == "cpu":
        return HostStopwatch()
    return CudaStopwatch() if device.type == "cuda" else None


def _unless_it_fails(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook that PyTorch calls: an error is logged, because it must not end the training."""

    @functools.wraps(hook)
    def guarded(*arguments: Any) -> None:
        try:
            hook(*arguments)
        except Exception:  # the boundary to the training, whose step would end for any error
            log.exception("the waiting of this rank cannot be measured; training goes on")

    return guarded
