"""Parts of the step time, and trained tokens. Training thread only."""

from __future__ import annotations

import logging
from typing import Any, Iterable, Mapping

import torch

from trainmedic.torch.meters.wait_meter import WaitMeter

log = logging.getLogger("trainmedic")


class StepMeter:
    def __init__(self, models: Iterable[Any], world_size: int) -> None:
        self.waits = WaitMeter(models, world_size)
        self.step_ends = self.waits.step_ends  # the loop calls it after every step, reported or not
        self._world_size = world_size
        self._data_seconds: float | None = None  # until the loop reports a batch
        self._tokens = 0
        self._counts_tokens = True  # until an error

    def add_batch(self, batch: Any, seconds: float) -> None:
        """``seconds``: the loop's wait for the batch."""
        self._data_seconds = (self._data_seconds or 0.0) + seconds
        if self._counts_tokens:
            try:
                self._tokens += tokens_in(batch)
            except Exception:  # errors of the user's mapping must not stop the batch
                self._counts_tokens, self._tokens = False, 0
                log.exception("cannot count the tokens of batches; training continues")

    def take(self, steps: int) -> dict[str, Any]:
        """Return `Medic.report`'s arguments for ``steps`` steps, and reset."""
        waited = self.waits.seconds_per_step()
        parts = {
            "data_seconds": self._data_seconds,
            "wait_seconds": waited * steps if waited is not None else None,
            "tokens": self._tokens * self._world_size or None,
        }
        if self._data_seconds is not None:
            self._data_seconds = 0.0
        self._tokens = 0
        return parts

    def close(self) -> None:
        self.waits.close()


def tokens_in(batch: Any) -> int:
    """Count a batch's tokens without padding; 0 if unknown. Raises the mapping's errors."""
    if isinstance(batch, (list, tuple)) or not isinstance(batch, Mapping):  # checking for a list first is cheaper
        return 0
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(ids, torch.Tensor):
        return 0
    if mask is None:
        return ids.numel()
    is_readable = isinstance(mask, torch.Tensor) and mask.device.type == "cpu" and mask.shape == ids.shape
    return int(torch.count_nonzero(mask)) if is_readable else 0
