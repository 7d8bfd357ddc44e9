"""Which losses come again after a rollback of a plain loop, and how closely they have to agree.

Who calls it: ``restore``, once the checkpoint is loaded. Not here: the comparison (``trainmedic.job.loss_log``).
"""

from __future__ import annotations

from typing import Any, Mapping

import torch

from trainmedic.job.loss_log import COARSE_KERNELS, EXACT_KERNELS, LossComparison, LossCourse
from trainmedic.recovery.health import Onset
from trainmedic.torch.sources.batch_sources import REPLAYED
from trainmedic.torch.state_parts import StateParts
from trainmedic.torch.training_state import TrainingState

_HALF = (torch.float16, torch.bfloat16)
_NO_STATE = "the checkpoint does not hold the run's own state"
_NO_RANDOM = "the checkpoint does not hold this rank's random numbers"
_OTHER_ACCUMULATION = "another number of batches makes a step than when the checkpoint was written"


def begin_comparison(
    training: TrainingState, kept: Mapping[str, Any] | None, data: str, skip: int, onset: Onset | None, is_replay: bool
) -> LossComparison:
    """Compare the losses from here on. ``data`` is what the answer says of the batches; ``is_replay`` whether the loop
    may draw the same ones though nobody knows it."""
    log, step = training.loss_log, training.global_step
    changed_at = log.first_change(step)
    if kept is not None and kept.get("lr_scale", training.rate.scale) != training.rate.scale:
        changed_at = min(step + 2, changed_at or step + 2)  # the first loss is made before its own update
    course = LossCourse(
        tolerance=tolerance_of(training.parts),
        not_comparable=_why_not(training, kept, data, skip, is_replay),
        is_known=data.startswith(REPLAYED),
        trouble_at=None if onset is None else onset.step,
        changed_at=changed_at,
    )
    return log.go_back(step, course)


def tolerance_of(parts: StateParts) -> float:
    """Return the share of a loss by which it may differ: see `EXACT_KERNELS` and `COARSE_KERNELS`."""
    parameters = [each for module in parts.modules().values() for each in module.parameters()]
    is_exact = all(each.device.type == "cpu" and each.dtype not in _HALF for each in parameters)
    return EXACT_KERNELS if is_exact else COARSE_KERNELS


def _why_not(training: TrainingState, kept: Mapping[str, Any] | None, data: str, skip: int, is_replay: bool) -> str:
    if skip:
        return f"{skip} batches are left out, so no step comes again"
    if kept is None:
        return _NO_STATE
    if kept.get("random") is None:
        return _NO_RANDOM
    accumulation = (kept.get("losses") or {}).get("accumulation", training.accumulation)
    if accumulation != training.accumulation:
        return _OTHER_ACCUMULATION
    return "" if is_replay or data.startswith(REPLAYED) else data
