from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable

import torch
from torch import nn

from trainmedic.job.loss_log import COARSE_KERNELS, EXACT_KERNELS, LossComparison, LossCourse, LossLog
from trainmedic.torch.sources.batch_sources import REPLAYED

_HALF = (torch.float16, torch.bfloat16)
_NO_STATE = "the checkpoint does not hold the run's own state"
_NO_RANDOM = "the checkpoint does not hold this rank's random numbers"
_OTHER_ACCUMULATION = "another number of batches makes a step than when the checkpoint was written"


@dataclass(frozen=True)
class Return:
    """A completed rollback."""

    step: int
    data: str
    """The answer's text about the batches."""
    skipped: int
    accumulation: int
    accumulation_then: int
    is_scaled_otherwise: bool
    trouble_at: int | None
    """First untrusted step."""
    has_state: bool = True
    """True if the checkpoint holds the run's own state."""
    has_random: bool = True
    """True if it holds the random state."""
    is_replay: bool = False
    """True if the loop may draw the same batches."""


def begin_comparison(log: LossLog, back: Return, models: Iterable[nn.Module]) -> LossComparison:
    changed_at = log.first_change(back.step)
    if back.is_scaled_otherwise:
        changed_at = min(back.step + 2, changed_at or back.step + 2)  # the first loss precedes its own update
    course = LossCourse(
        tolerance=tolerance_of(models),
        not_comparable=_why_not(back),
        is_known=back.data.startswith(REPLAYED),
        trouble_at=back.trouble_at,
        changed_at=changed_at,
    )
    return log.go_back(back.step, course)


def tolerance_of(models: Iterable[nn.Module]) -> float:
    parameters = [each for module in models for each in module.parameters()]
    is_exact = all(each.device.type == "cpu" and each.dtype not in _HALF for each in parameters)
    return EXACT_KERNELS if is_exact else COARSE_KERNELS


def _why_not(back: Return) -> str:
    if back.skipped:
        return f"{back.skipped} batches are left out, so no step comes again"
    if not back.has_state:
        return _NO_STATE
    if not back.has_random:
        return _NO_RANDOM
    if back.accumulation != back.accumulation_then:
        return _OTHER_ACCUMULATION
    return "" if back.is_replay or back.data.startswith(REPLAYED) else back.data
