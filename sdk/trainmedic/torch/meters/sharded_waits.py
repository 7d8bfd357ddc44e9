"""Waiting time for other ranks in FSDP.

FSDP gathers the next layer during computation, so only unhidden time counts: on a CPU the time in collectives, on CUDA
stalls of the compute stream.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Iterator
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_sharded_data_parallel

from trainmedic.torch.meters.stopwatches import CudaStopwatch, MeasuredCalls, Stopwatch, stopwatch_for

try:
    from torch.distributed.fsdp import _runtime_utils as runtime
except ImportError:  # later PyTorch releases may lack it
    runtime = None  # type: ignore[assignment]

_GROUP_METHODS = ("wait_for_unshard", "post_backward", "finalize_backward")  # waiting methods of `fully_shard` on CUDA
_GROUP_COLLECTIVES = ("_all_gather_comm", "_reduce_scatter_comm")  # callable objects of `fully_shard` on a CPU
# Functions of `FullyShardedDataParallel`, whose parameters are flat. First those that wait on CUDA.
_FLAT_WAITS = ("_pre_forward_unshard", "_pre_backward_hook", "_post_backward_final_callback")
_FLAT_GATHERING = "_all_gather_flat_param"  # gathering method of a handle, on a CPU
_FLAT_REDUCTIONS = ("_reduce_grad", "_reduce_grad_no_shard")  # reducing functions on a CPU
_CUDA_EVERY = 4  # steps between measurements: a hundred layers need hundreds of events

# By `FullyShardedDataParallel` module; its functions are wrapped once for all models.
_watched: WeakKeyDictionary[Any, ShardedWaits] = WeakKeyDictionary()


class ShardedWaits(MeasuredCalls):
    def __init__(self, stopwatch: Stopwatch) -> None:
        super().__init__(stopwatch)
        self._every = _CUDA_EVERY if isinstance(stopwatch, CudaStopwatch) else 1
        self._steps = 0
        self._wrapped: list[tuple[Any, str]] = []  # owner and method
        self._changed: list[tuple[Any, type]] = []  # collective and original class
        self._flat: list[Any] = []  # modules in `_watched`
        self.functions: tuple[str, ...] = ()  # measured functions of `FullyShardedDataParallel`

    @classmethod
    def of(cls, model: nn.Module, world_size: int) -> ShardedWaits | None:
        """Return the measurement, or None unless only FSDP shards the model, over all ranks."""
        flat = [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
        groups = list(_groups_of(model))
        # With both kinds, other parallelism, or reduction by the loop, ranks wait in places that are not measured. A
        # flat module inside another model may have an unknown outer one, whose gathering is not measured.
        is_flat = isinstance(model, FullyShardedDataParallel)
        if is_flat == bool(groups) or bool(flat) != is_flat or (groups and not _all_are_sharded(model)):
            return None
        spans = [_spans_all_ranks(group, world_size) for group in groups]
        spans += [_flat_spans_all_ranks(module, world_size) for module in flat]
        stopwatch = _stopwatch_for(model) if all(spans) else None
        if stopwatch is None:
            return None
        waits = cls(stopwatch)
        if waits._watch_groups(groups) if groups else waits._watch_flat(flat):
            return waits
        waits.close()
        return None

    def step_ends(self) -> None:
        super().step_ends()
        self._steps += 1

    def close(self) -> None:
        for owner, name in self._wrapped:
            owner.__dict__.pop(name, None)
        for collective, kind in self._changed:
            collective.__class__ = kind
        for module in self._flat:
            _watched.pop(module, None)
        self._wrapped, self._changed, self._flat = [], [], []

    def measured(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if self._steps % self._every:
            return function(*arguments, **named)
        return super().measured(function, *arguments, **named)

    def _wrap(self, owner: Any, name: str) -> bool:
        if not callable(getattr(owner, name, None)):
            return False
        setattr(owner, name, functools.partial(self.measured, getattr(owner, name)))
        self._wrapped.append((owner, name))
        return True

    def _watch_groups(self, groups: list[Any]) -> bool:
        """Return False if these waits cannot be measured."""
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
        """Call a collective. The wait for an asynchronous one is elsewhere, and not measured."""
        handle = self.measured(call, *arguments, **named)
        self._is_unknown |= handle is not None
        return handle

    def _watch_flat(self, modules: list[Any]) -> bool:
        is_cuda = isinstance(self.stopwatch, CudaStopwatch)
        self.functions = _FLAT_WAITS if is_cuda else _FLAT_REDUCTIONS
        if not all(_wrap_for_measuring(name) for name in self.functions):
            return False
        handles = [module._handle for module in modules if module._handle is not None]
        if not is_cuda and not all(self._wrap(handle, _FLAT_GATHERING) for handle in handles):
            return False
        for module in modules:
            _watched[module] = self
        self._flat = modules
        return True


def _measured_kind(kind: type, waits: ShardedWaits) -> type:
    # A subclass, because Python looks ``__call__`` up in the class.

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


def _spans_all_ranks(group: Any, world_size: int) -> bool:
    mesh = group.mesh_info.mesh
    meshes = [getattr(each.sharded_param, "device_mesh", None) for each in group.fsdp_params]
    return bool(mesh.size() == world_size) and all(each is not None and each.ndim == mesh.ndim for each in meshes)


def _flat_spans_all_ranks(module: FullyShardedDataParallel, world_size: int) -> bool:
    between_nodes = getattr(module, "_inter_node_pg", None)  # replicas, if shards stay within a node
    replicas = between_nodes.size() if between_nodes is not None else 1
    return bool(module.world_size * replicas == world_size)


def _stopwatch_for(model: nn.Module) -> Stopwatch | None:
    """Return None for several kinds of devices, or offloading."""
    kinds = {parameter.device.type for parameter in model.parameters()}
    is_offloaded = kinds == {"cpu"} and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return stopwatch_for(kinds.pop()) if len(kinds) == 1 and not is_offloaded else None


def _wrap_for_measuring(name: str) -> bool:
    """Return False if PyTorch lacks it."""
    function = getattr(runtime, name, None)
    if not callable(function):
        return False
    if not hasattr(function, "_trainmedic"):
        wrapper = _measuring(function, name)
        for module in (runtime, fully_sharded_data_parallel):
            if getattr(module, name, None) is function:
                setattr(module, name, wrapper)
    return True


def _measuring(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def measuring(state: Any, *arguments: Any, **named: Any) -> Any:
        waits = _watched.get(state)
        if waits is None or name not in waits.functions:
            return function(state, *arguments, **named)
        return waits.measured(function, state, *arguments, **named)

    measuring._trainmedic = True  # type: ignore[attr-defined]
    return measuring
