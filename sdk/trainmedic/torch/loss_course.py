"""Conditions under which the losses after a rollback must agree with those before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable

import torch
from torch import nn

from trainmedic.job.loss_log import COARSE_KERNELS, EXACT_KERNELS, LossComparison, LossCourse, LossLog
from trainmedic.torch.sources.batch_sources import REPLAYED

_HALF_PRECISION = (torch.float16, torch.bfloat16)
_NO_STATE = "the checkpoint does not hold the run's own state"
_NO_RANDOM = "the checkpoint does not hold this rank's random numbers"
_OTHER_ACCUMULATION = "another number of batches makes a step than when the checkpoint was written"


@dataclass(frozen=True)
class CompletedRollback:
    step: int  # step of the checkpoint
    data: str  # the answer's text about the batches
    skipped: int  # batches that the command skips
    accumulation: int  # the present one
    accumulation_then: int  # accumulation at the checkpoint
    is_scaled_otherwise: bool  # True if the learning rate's factor is not the checkpoint's
    trouble_at: int | None  # first untrusted step before the rollback
    has_state: bool = True  # True if the checkpoint holds the run's own state
    has_random: bool = True  # True if it holds the random state
    may_be_same: bool = False  # True if unknown batches may be the same ones, so compare


def begin_comparison(log: LossLog, rollback: CompletedRollback, models: Iterable[nn.Module]) -> LossComparison:
    changed_at = log.first_changed_step(rollback.step)
    if rollback.is_scaled_otherwise:
        # The first step's loss precedes its update, so the rate changes the second.
        second = rollback.step + 2
        changed_at = second if changed_at is None else min(second, changed_at)
    course = LossCourse(
        tolerance=tolerance_of(models),
        not_comparable=_why_not_comparable(rollback),
        is_known=rollback.data.startswith(REPLAYED),
        trouble_at=rollback.trouble_at,
        changed_at=changed_at,
    )
    return log.go_back(rollback.step, course)


def tolerance_of(models: Iterable[nn.Module]) -> float:
    """Return a relative difference."""
    parameters = [each for module in models for each in module.parameters()]
    is_exact = all(each.device.type == "cpu" and each.dtype not in _HALF_PRECISION for each in parameters)
    return EXACT_KERNELS if is_exact else COARSE_KERNELS


def _why_not_comparable(rollback: CompletedRollback) -> str:
    """Return why no loss can be compared, or ""."""
    if rollback.skipped:
        return f"{rollback.skipped} batches are left out, so no step comes again"
    if not rollback.has_state:
        return _NO_STATE
    if not rollback.has_random:
        return _NO_RANDOM
    if rollback.accumulation != rollback.accumulation_then:
        return _OTHER_ACCUMULATION
    return "" if rollback.may_be_same or rollback.data.startswith(REPLAYED) else rollback.data
