"""What the time of a step goes into, and the tokens that it is trained on, gathered for the next report.

Who calls it: the integrations, from the training thread; they say when a batch is drawn and when a step is complete.
Not here: how the waiting for other ranks is measured (``wait_meter``).
"""

from __future__ import annotations

from typing import Any, Iterable, Mapping

import torch

from trainmedic.torch.meters.wait_meter import WaitMeter, Waits


class StepMeter:
    """The parts of the steps since the last report. ``models`` are those that are trained, wrapped or not."""

    def __init__(self, models: Iterable[Any], world_size: int) -> None:
        self._waits = WaitMeter(models, world_size)
        self.step_ends = self._waits.step_ends
        """A step is complete. Called for each, also for those that are not reported."""
        self._world_size = world_size
        self._data_seconds: float | None = None  # None in a loop that does not say when it draws a batch
        self._tokens = 0

    def measure_waits(self, model: torch.nn.Module, waits: Waits) -> None:
        """Measure the waiting of this model, one of the trained ones, with `waits`."""
        self._waits.add(model, waits)

    def add_batch(self, batch: Any, seconds: float) -> None:
        """The loop has got a batch, after it has waited so long for it."""
        self._data_seconds = (self._data_seconds or 0.0) + seconds
        self._tokens += tokens_in(batch)

    def start_waiting(self) -> None:
        """The loop is about to wait for other ranks, outside of what is measured anyway."""
        self._waits.start()

    def stop_waiting(self) -> None:
        """It has waited."""
        self._waits.stop()

    def take(self, steps: int) -> dict[str, Any]:
        """The arguments of `Medic.report` for a report of so many steps. The next call begins anew."""
        waited = self._waits.seconds_per_step()
        parts = {
            "data_seconds": self._data_seconds,
            "wait_seconds": waited * steps if waited is not None else None,
            "tokens": self._tokens * self._world_size or None,
        }
        self._data_seconds, self._tokens = (0.0 if self._data_seconds is not None else None), 0
        return parts

    def close(self) -> None:
        """Take the hooks off the models."""
        self._waits.close()


def tokens_in(batch: Any) -> int:
    """The tokens of a batch that names them as transformers does; 0 where it is not certain how many they are.

    Padding does not count. A mask on a device is not read, because that would wait for it.
    """
    if isinstance(batch, (list, tuple)) or not isinstance(batch, Mapping):  # asking for a list costs less
        return 0
    try:
        ids, mask = batch.get("input_ids"), batch.get("attention_mask")
        if not isinstance(ids, torch.Tensor):
            return 0
        if mask is None:
            return ids.numel()
        is_readable = isinstance(mask, torch.Tensor) and mask.device.type == "cpu" and mask.shape == ids.shape
        return int(torch.count_nonzero(mask)) if is_readable else 0
    except Exception:  # whatever the user's own mapping or tensors raise: the batch may be trained on all the same
        return 0
