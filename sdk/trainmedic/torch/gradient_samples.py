"""Norms of parts of the gradients that an update uses: a sign of what was trained, whatever the loop reports.

They are taken in the steps after a checkpoint, in which losses are noted too, and of few parameters, so that they cost
little. Who calls it: the hooks on the optimizers (``optimizer_steps``). Not here: their comparison
(``trainmedic.job.loss_log``).
"""

from __future__ import annotations

from typing import Any

import torch

from trainmedic.torch.training_state import TrainingState

_PARAMETERS = 16
"""Parameters of an optimizer whose gradients are looked at, evenly spread."""
_NUMBERS = 4096
"""Numbers of each gradient."""


class GradientSamples:
    """Adds the norms of each update to ``TrainingState.gradients``, as long as losses are noted."""

    def __init__(self, training: TrainingState) -> None:
        self._training = training

    def take(self, optimizer: Any) -> None:
        """Take those of an optimizer, right before its update."""
        training = self._training
        if training.global_step < training.loss_log.until:
            training.gradients.extend(_norms(optimizer))


def _norms(optimizer: Any) -> list[torch.Tensor]:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    every = max(len(parameters) // _PARAMETERS, 1)
    gradients = [each.grad.detach() for each in parameters[::every] if each.grad is not None]
    parts = [_part(each) for each in gradients if each.layout == torch.strided and each.numel()]
    norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in parts]
    is_in_one_place = len({each.device for each in norms}) == 1
    return [torch.stack(norms)] if is_in_one_place else norms


def _part(gradient: torch.Tensor) -> torch.Tensor:
    """Return the first numbers of a gradient; of one that is spread over ranks, of what this rank holds."""
    own = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    row = own if own.is_contiguous() or not own.dim() else own[0]
    return row.reshape(-1)[:_NUMBERS]
