"""Gradient norms by layer, over this rank's shards.

Non-finite gradients spread from output to input, so layers near the output come first.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Iterable, cast

import torch
from torch import nn

from trainmedic.client import Medic
from trainmedic.torch.optimizer_steps import HOOKS, stepping

log = logging.getLogger("trainmedic")

_INTERVAL = 5.0  # seconds, because a measurement reads all gradients
_NEVER = float("inf")


class LayerNorms:
    """Measures ``models`` on rank 0 before ``optimizers`` step."""

    def __init__(self, models: Iterable[Any], optimizers: Iterable[Any], medic: Medic) -> None:
        self._progress = medic.progress
        is_wanted = medic.rank == 0 and medic.progress.most_layers > 0
        self._due_at = 0.0 if is_wanted else _NEVER
        self._layers = _layers(models) if is_wanted else {}
        hook = cast(Any, torch.compiler.disable)(lambda *_: self.measure())
        stepped = [each for optimizer in optimizers for each in stepping(optimizer)] if is_wanted else []
        self._handles = [each.register_step_pre_hook(hook) for each in stepped if hasattr(each, HOOKS)]

    def measure(self) -> None:
        now = time.monotonic()
        if now < self._due_at:
            return
        self._due_at = now + _INTERVAL
        try:
            self._progress.layer_norms = self._norms()
        except Exception:  # PyTorch's errors on unusual gradients must not end the step
            log.exception("cannot measure the layers' gradient norms; training continues")
            self._due_at = _NEVER

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _norms(self) -> dict[str, torch.Tensor]:
        norms: dict[str, torch.Tensor] = {}
        for layer, parameters in self._layers.items():
            gradients = [_local(each.grad) for each in parameters if each.grad is not None]
            if gradients:
                norms[layer] = torch.nn.utils.get_total_norm(gradients)
        return norms


def _layers(models: Iterable[Any]) -> dict[str, list[nn.Parameter]]:
    layers: dict[str, list[nn.Parameter]] = {}
    for model in models:
        if isinstance(model, nn.Module):
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    layers.setdefault(layer_of(name), []).append(parameter)
    return dict(reversed(layers.items()))


def layer_of(name: str) -> str:
    """Return a parameter's name up to the first number (``model.layers.7``), else its module's."""
    parts = [part for part in name.split(".")[:-1] if part not in ("module", "_orig_mod", "_fsdp_wrapped_module")]
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts) or name


def _local(gradient: Any) -> torch.Tensor:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient  # type: ignore[no-any-return]
