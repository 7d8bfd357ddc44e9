"""How long a Trainer waits for its batches, and for the other ranks before it trains on them.

The Trainer draws the batches of a step together, in ``get_batch_samples``, and then lets the ranks count together how
many tokens they have to train on. There a rank waits for the others' data. `HuggingFaceLoop` uses this around
``Trainer.train``.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Callable

from trainmedic.torch.meters.step_meter import StepMeter

_DRAW = "get_batch_samples"
_COUNT = "_get_num_items_in_batch"


class BatchTimer:
    """While the context lasts, the meter that `meter` returns is told of the Trainer's batches."""

    def __init__(self, trainer: Any, meter: Callable[[], StepMeter | None]) -> None:
        self._trainer = trainer
        self._meter = meter
        self._originals: dict[str, Any] = {}
        self._counting = 0.0  # seconds, within the present draw

    def __enter__(self) -> BatchTimer:
        for name, timed in ((_DRAW, self._draw), (_COUNT, self._count)):
            if hasattr(self._trainer, name):
                self._originals[name] = getattr(self._trainer, name)
                setattr(self._trainer, name, timed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self._originals:
            vars(self._trainer).pop(name, None)

    def _draw(self, *arguments: Any, **options: Any) -> Any:
        began, self._counting = time.perf_counter(), 0.0
        samples, items = self._originals[_DRAW](*arguments, **options)
        seconds = time.perf_counter() - began - self._counting
        meter = self._meter()
        if meter is not None:
            for number, batch in enumerate(samples):
                meter.add_batch(batch, 0.0 if number else seconds)
        return samples, items

    def _count(self, *arguments: Any, **options: Any) -> Any:
        began, meter = time.perf_counter(), self._meter()
        if meter is not None:
            meter.start_waiting()
        items = self._originals[_COUNT](*arguments, **options)
        if meter is not None:
            meter.stop_waiting()
        self._counting += time.perf_counter() - began
        return items
