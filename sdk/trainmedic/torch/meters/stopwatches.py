"""Stopwatches for spans of a training step, by the host's clock or by that of a CUDA device.

Work on a CUDA device is only queued by the host, so a span of it lies between two events in the device's queue. They
are read when the device has passed them, which it does while training goes on: nothing here waits for a device.

Who calls it: ``wait_meter``. Not here: which spans are measured.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Protocol

import torch

_MOST_PENDING = 256  # steps whose events the device has not passed: more than a host runs ahead


class Stopwatch(Protocol):
    """Measures spans, and sums those of each step."""

    def start(self) -> None:
        """A span begins, in place of one that has not ended."""

    def stop(self) -> None:
        """The span ends, if one has begun."""

    def step_ends(self, is_known: bool) -> None:
        """The spans since the last call are those of one step, which counts where all of them are known."""

    def seconds_per_step(self) -> float | None:
        """The mean of the steps that ended since the last call, as far as they are known by now; None for none."""


class HostStopwatch:
    """By the host's clock, for work that the host waits for itself."""

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
    """By events in the queue of the present CUDA device."""

    def __init__(self) -> None:
        self._spare: list[Any] = []
        self._began: Any = None
        self._of_step: list[tuple[Any, Any]] = []
        self._pending: deque[list[tuple[Any, Any]]] = deque()

    def start(self) -> None:
        self._began = self._recorded()

    def stop(self) -> None:
        began, self._began = self._began, None
        ended = self._recorded() if began is not None else None
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
        # In the order of the queue: where the last event of a step has passed, all before it have.
        while self._pending and self._pending[0][-1][1].query():
            spans = self._pending.popleft()
            total += sum(began.elapsed_time(ended) for began, ended in spans) / 1000  # it tells milliseconds
            steps += 1
            self._spare.extend(event for span in spans for event in span)
        return total / steps if steps else None

    def _recorded(self) -> Any:
        """An event at the present end of the queue; None while the queue is captured for a graph."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
