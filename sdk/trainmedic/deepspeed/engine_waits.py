"""A rank's waiting time in a DeepSpeed engine, whose collectives all use one object.

With ``overlap_comm`` (ZeRO stage 3 by default) nothing is reported on CUDA.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch

from trainmedic.torch.meters.stopwatches import MeasuredCalls, Stopwatch, stopwatch_for

try:
    from deepspeed.comm import comm  # type: ignore[import-not-found]
except ImportError:  # not a real DeepSpeed engine
    comm = None

# Methods of the backend.
_COLLECTIVES = (
    *("all_reduce", "inference_all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "broadcast"),
    *("all_gather", "all_gather_into_tensor", "all_gather_base", "all_gather_coalesced", "reduce_scatter_tensor"),
    *("all_to_all_single", "all_to_all", "gather", "scatter", "barrier", "monitored_barrier"),
)


class EngineWaits(MeasuredCalls):
    """`Waits` in DeepSpeed's collectives, methods of ``backend``."""

    def __init__(self, stopwatch: Stopwatch, backend: Any) -> None:
        super().__init__(stopwatch)
        self._backend = backend
        self._compute_stream = _current_stream()
        for name in _COLLECTIVES:
            if callable(getattr(type(backend), name, None)):
                setattr(backend, name, functools.partial(self._call, getattr(backend, name)))

    @classmethod
    def of(cls, engine: Any) -> EngineWaits | None:
        """Return the measurement; None with model parallelism, or on other devices than CPU and CUDA."""
        backend = getattr(comm, "cdb", None)
        if backend is None or getattr(engine, "mpu", None) is not None:
            return None  # model parallelism has its own groups and calls
        stopwatch = stopwatch_for(getattr(getattr(engine, "device", None), "type", None))
        return None if stopwatch is None else cls(stopwatch, backend)

    def step_ends(self) -> None:
        super().step_ends()
        self._compute_stream = _current_stream()

    def close(self) -> None:
        for name in _COLLECTIVES:
            wrapper = self._backend.__dict__.get(name)
            if isinstance(wrapper, functools.partial) and wrapper.func == self._call:
                del self._backend.__dict__[name]

    def _call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        answer = self.measured(function, *arguments, **named)
        return _Handle(answer, self) if callable(getattr(answer, "wait", None)) else answer

    def measured(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if _current_stream() != self._compute_stream:
            self._is_unknown = True
            return function(*arguments, **named)
        return super().measured(function, *arguments, **named)


class _Handle:
    def __init__(self, handle: Any, waits: EngineWaits) -> None:
        self._handle = handle
        self._waits = waits

    def wait(self, *arguments: Any, **named: Any) -> Any:
        return self._waits.measured(self._handle.wait, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def _current_stream() -> Any:
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
