"""Gradient norms of a few parameters after a checkpoint: evidence independent of the loop's reports."""

from __future__ import annotations

import logging
from typing import Any, Iterator

import torch

from trainmedic.torch.training_state import TrainingState

log = logging.getLogger("trainmedic")

_PARAMETERS = 16  # fewest to sample per optimizer, evenly; at most twice as many
_NUMBERS = 4096  # read of each parameter


class GradientSamples:
    def __init__(self, training: TrainingState) -> None:
        self._training = training
        self._works = True

    def take(self, optimizer: Any) -> None:
        """Sample gradients right before an update; log errors."""
        training = self._training
        if not self._works or training.global_step >= training.loss_log.until:
            return
        try:
            training.gradients.extend(_norms(optimizer))
        except Exception as error:  # tensors of other packages may lack PyTorch functions
            self._works, training.gradients = False, []
            message = "%s: gradients are not compared after rollbacks: %s"
            log.warning(message, training.medic.job, error, exc_info=error)


def _norms(optimizer: Any) -> list[torch.Tensor]:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    every = max(len(parameters) // _PARAMETERS, 1)
    gradients = [each.grad.detach() for each in parameters[::every] if each.grad is not None]
    parts = [_first_numbers(each) for each in gradients if _is_readable(each)]
    norms = [torch.linalg.vector_norm(numbers) for part in parts for numbers in _with_half(part)]
    is_on_one_device = len({each.device for each in norms}) == 1
    return [torch.stack(norms)] if is_on_one_device else norms


def _is_readable(gradient: torch.Tensor) -> bool:
    return gradient.layout == torch.strided and gradient.numel() > 0 and not gradient.is_meta


def _first_numbers(gradient: torch.Tensor) -> torch.Tensor:
    own = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    row = own if own.is_contiguous() or not own.dim() else own[0]
    numbers = row.reshape(-1)[:_NUMBERS]
    return (torch.view_as_real(numbers).reshape(-1) if numbers.is_complex() else numbers).to(torch.float32)


def _with_half(numbers: torch.Tensor) -> Iterator[torch.Tensor]:
    # The loop may normalize each whole gradient, which hides a difference of its norm.
    yield numbers
    if numbers.numel() > 1:
        yield numbers[: numbers.numel() // 2]
