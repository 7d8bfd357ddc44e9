"""Stopwatches on the host or by queued CUDA events; nothing waits for a device."""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from typing import Any, Callable, Protocol

import torch

from trainmedic.torch.model_hook import ModelHook
from trainmedic.wire.log_limit import LogLimit

log = logging.getLogger("trainmedic")

_log_limit = LogLimit(lines=1)

_MOST_PENDING = 256  # steps not read yet; beyond it the oldest is dropped


class Stopwatch(Protocol):
    def start(self) -> None:
        """Begin a span; replaces an unfinished one."""

    def stop(self) -> None:
        """End the span, if any."""

    def step_ends(self, is_known: bool) -> None:
        """End a step, which counts only if all its spans are known."""

    def seconds_per_step(self) -> float | None:
        """Return the mean of the known steps since the last call; None without any."""


class HostStopwatch:
    def __init__(self) -> None:
        self._began: float | None = None
        self._of_step = 0.0
        self._total, self._steps = 0.0, 0

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> None:
        if self._began is not None:
            self._of_step += time.perf_counter() - self._began
            self._began = None

    def step_ends(self, is_known: bool) -> None:
        if is_known:
            self._total, self._steps = self._total + self._of_step, self._steps + 1
        self._began, self._of_step = None, 0.0

    def seconds_per_step(self) -> float | None:
        if not self._steps:
            return None
        mean = self._total / self._steps
        self._total, self._steps = 0.0, 0
        return mean


class CudaStopwatch:
    def __init__(self) -> None:
        self._spare: list[Any] = []  # events to use again
        self._began: Any = None
        self._of_step: list[tuple[Any, Any]] = []  # events at the begin and end of each span
        self._pending: deque[list[tuple[Any, Any]]] = deque()  # the same of known steps that are not read yet

    def start(self) -> None:
        self._began = self._record_event()

    def stop(self) -> None:
        began, self._began = self._began, None
        ended = self._record_event() if began is not None else None
        if ended is not None:
            self._of_step.append((began, ended))

    def step_ends(self, is_known: bool) -> None:
        if is_known and self._of_step:
            self._pending.append(self._of_step)
            if len(self._pending) > _MOST_PENDING:
                self._pending.popleft()
        self._began, self._of_step = None, []

    def seconds_per_step(self) -> float | None:
        total, steps = 0.0, 0
        # In queue order: after a step's last event, all earlier ones have passed.
        while self._pending and self._pending[0][-1][1].query():
            spans = self._pending.popleft()
            total += sum(began.elapsed_time(ended) for began, ended in spans) / 1000  # milliseconds
            steps += 1
            self._spare.extend(event for span in spans for event in span)
        return total / steps if steps else None

    def _record_event(self) -> Any:
        """Queue an event; None while a graph is captured."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def stopwatch_for(device: str | None) -> Stopwatch | None:
    """Return one for this type of device, or None."""
    if device == "cpu":
        return HostStopwatch()
    return CudaStopwatch() if device == "cuda" else None


class MeasuredCalls:
    """`Waits` in wrapped calls, of which the outermost is measured."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch
        self._depth = 0  # of nested measured calls
        self._has_waited = False  # a call of this step was measured
        self._is_unknown = False  # a wait of this step was not measured

    def step_ends(self) -> None:
        self.stopwatch.step_ends(self._has_waited and not self._is_unknown)
        self._has_waited = self._is_unknown = False
        self._depth = 0

    def measured(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if self._depth == 0:
            measure(self.stopwatch.start)
            self._has_waited = True
        self._depth += 1
        try:
            return function(*arguments, **named)
        finally:
            self._depth = max(self._depth - 1, 0)
            if self._depth == 0:
                measure(self.stopwatch.stop)


def measure(call: Callable[..., None], *arguments: Any) -> None:
    """Log a measurement's errors, one a minute."""
    try:
        call(*arguments)
    except Exception:  # boundary to the training step
        if _log_limit.lets_through():
            log.exception("cannot measure this rank's waiting; training continues")


def measuring_hook(call: Callable[..., None]) -> ModelHook:
    return ModelHook(functools.partial(measure, call))
