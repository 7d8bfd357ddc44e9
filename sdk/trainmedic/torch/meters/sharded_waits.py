"""Waiting time for other ranks in FSDP.

FSDP gathers the next layer during computation, so only unhidden time counts: on a CPU the time in collectives, on CUDA
stalls of the compute stream.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Callable, Iterator
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_sharded_data_parallel

from trainmedic.torch.meters.stopwatches import CudaStopwatch, HostStopwatch, Stopwatch

try:
    from torch.distributed.fsdp import _runtime_utils as runtime
except ImportError:  # later PyTorch releases may lack it
    runtime = None  # type: ignore[assignment]

log = logging.getLogger("trainmedic")

_GROUP_METHODS = ("wait_for_unshard", "post_backward", "finalize_backward")
"""Waiting methods of `fully_shard` on CUDA."""
_GROUP_COLLECTIVES = ("_all_gather_comm", "_reduce_scatter_comm")
"""Callable objects of `fully_shard` on a CPU."""
_FLAT_WAITS = ("_pre_forward_unshard", "_pre_backward_hook", "_post_backward_final_callback")
"""Waiting functions of `FullyShardedDataParallel` on CUDA."""
_FLAT_GATHERING = "_all_gather_flat_param"
_FLAT_SUMS = ("_reduce_grad", "_reduce_grad_no_shard")
"""Summing functions of `FullyShardedDataParallel` on a CPU."""
_CUDA_EVERY = 4
"""A hundred layers need hundreds of events."""

_watched: WeakKeyDictionary[Any, ShardedWaits] = WeakKeyDictionary()


class ShardedWaits:
    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch
        self._every = _CUDA_EVERY if isinstance(stopwatch, CudaStopwatch) else 1
        self._steps = 0
        self._depth = 0
        self._has_waited = False
        self._is_hidden = False
        self._wrapped: list[tuple[Any, str]] = []
        self._changed: list[tuple[Any, type]] = []
        self._flat: list[Any] = []
        self.functions: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, world_size: int) -> ShardedWaits | None:
        """Return the measurement, or None unless only FSDP shards the model, over all ranks."""
        flat = [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
        groups = list(_groups_of(model))
        # With both kinds, other parallelism, or reduction by the loop, ranks wait in places that are not measured. The
        # same holds for the gathering by a `FullyShardedDataParallel` around this model.
        is_flat = isinstance(model, FullyShardedDataParallel)
        if is_flat == bool(groups) or bool(flat) != is_flat or (groups and not _all_are_sharded(model)):
            return None
        spans = [*(_spans(group, world_size) for group in groups), *(_is_of(module, world_size) for module in flat)]
        stopwatch = _stopwatch_for(model) if all(spans) else None
        if stopwatch is None:
            return None
        waits = cls(stopwatch)
        if waits._watch_groups(groups) if groups else waits._watch_flat(flat):
            return waits
        waits.close()
        return None

    def step_ends(self) -> None:
        is_known = self._has_waited and not self._is_hidden
        self._has_waited = self._is_hidden = False
        self._depth = 0
        self.stopwatch.step_ends(is_known)
        self._steps += 1

    def seconds_per_step(self) -> float | None:
        return self.stopwatch.seconds_per_step()

    def close(self) -> None:
        for owner, name in self._wrapped:
            owner.__dict__.pop(name, None)
        for collective, kind in self._changed:
            collective.__class__ = kind
        for module in self._flat:
            _watched.pop(module, None)
        self._wrapped, self._changed, self._flat = [], [], []

    def measured(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        is_on = self._steps % self._every == 0
        if is_on and self._depth == 0:
            self._call_meter(self.stopwatch.start)
            self._has_waited = True
        self._depth += 1
        try:
            return function(*arguments, **named)
        finally:
            self._depth = max(self._depth - 1, 0)
            if is_on and self._depth == 0:
                self._call_meter(self.stopwatch.stop)

    def _call_meter(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # an error here must not end the step
            log.exception("cannot measure this rank's waiting; training continues")

    def _wrap(self, owner: Any, name: str) -> bool:
        if not callable(getattr(owner, name, None)):
            return False
        setattr(owner, name, functools.partial(self.measured, getattr(owner, name)))
        self._wrapped.append((owner, name))
        return True

    def _watch_groups(self, groups: list[Any]) -> bool:
        if isinstance(self.stopwatch, CudaStopwatch):
            return all(self._wrap(group, name) for group in groups for name in _GROUP_METHODS)
        if any(group.mesh_info.mesh.ndim > 1 for group in groups):
            return False  # the reduction over replicas is not a separate call
        collectives = {id(each): each for group in groups for each in map(group.__dict__.get, _GROUP_COLLECTIVES)}
        if None in collectives.values():
            return False
        for collective in collectives.values():
            self._changed.append((collective, type(collective)))
            collective.__class__ = _measured_kind(type(collective), self)
        return True

    def collect(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a collective; others wait for an asynchronous one."""
        work = self.measured(call, *arguments, **named)
        self._is_hidden |= work is not None
        return work

    def _watch_flat(self, modules: list[Any]) -> bool:
        is_cuda = isinstance(self.stopwatch, CudaStopwatch)
        self.functions = _FLAT_WAITS if is_cuda else _FLAT_SUMS
        if not all(_is_passing(name) for name in self.functions):
            return False
        handles = [module._handle for module in modules if module._handle is not None]
        if not is_cuda and not all(self._wrap(handle, _FLAT_GATHERING) for handle in handles):
            return False
        for module in modules:
            _watched[module] = self
        self._flat = modules
        return True


def _measured_kind(kind: type, waits: ShardedWaits) -> type:
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        return waits.collect(functools.partial(kind.__call__, self), *arguments, **named)

    return type(kind.__name__, (kind,), {"__call__": call})


def _groups_of(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        get_state = getattr(module, "_get_fsdp_state", None)
        state = get_state() if callable(get_state) else None
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before PyTorch 2.12
            groups = [getattr(state, "_fsdp_param_group", None)]
        yield from (group for group in groups if group is not None)


def _all_are_sharded(model: nn.Module) -> bool:
    return all(hasattr(each, "device_mesh") for each in model.parameters() if each.requires_grad)


def _spans(group: Any, world_size: int) -> bool:
    mesh = group.mesh_info.mesh
    meshes = [getattr(each.sharded_param, "device_mesh", None) for each in group.fsdp_params]
    return bool(mesh.size() == world_size) and all(each is not None and each.ndim == mesh.ndim for each in meshes)


def _is_of(module: FullyShardedDataParallel, world_size: int) -> bool:
    between = getattr(module, "_inter_node_pg", None)
    return module.world_size * (between.size() if between is not None else 1) == world_size


def _stopwatch_for(model: nn.Module) -> Stopwatch | None:
    kinds = {parameter.device.type for parameter in model.parameters()}
    if kinds == {"cpu"} and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # with CUDA, parameters are offloaded
        return HostStopwatch()
    return CudaStopwatch() if kinds == {"cuda"} else None


def _is_passing(name: str) -> bool:
    """False if PyTorch lacks it."""
    function = getattr(runtime, name, None)
    if not callable(function):
        return False
    if not hasattr(function, "_trainmedic"):
        wrapper = _passing(function, name)
        for module in (runtime, fully_sharded_data_parallel):
            if getattr(module, name, None) is function:
                setattr(module, name, wrapper)
    return True


def _passing(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def passed(state: Any, *arguments: Any, **named: Any) -> Any:
        waits = _watched.get(state)
        if waits is None or name not in waits.functions:
            return function(state, *arguments, **named)
        return waits.measured(function, state, *arguments, **named)

    passed._trainmedic = True  # type: ignore[attr-defined]
    return passed
