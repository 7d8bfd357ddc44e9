"""The norms of the gradient by layer, of the layers where they are largest: where a training blows up.

They are measured every few seconds, when an optimizer is about to step, on the device and without waiting for it; who
asks for them reads them. A gradient that is not a number spreads through the backward pass, from the output to the
input, so of several such layers the one nearest to the output comes first.

Who calls it: the integrations make one where `trainmedic.connect` was asked for it (``layer_norms``). Not here: the
norm of the whole gradient, which the loop reports.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Iterable

import torch
from torch import nn

from trainmedic.client import Medic

log = logging.getLogger("trainmedic")

_INTERVAL = 5.0
"""Seconds between two measurements: one reads all gradients, as clipping them does."""
_NEVER = float("inf")


class LayerNorms:
    """Measures the layers of ``models`` when one of ``optimizers`` steps, and leaves the norms with ``medic``.

    It does so on rank 0, which shows them, and where they were asked for; elsewhere it does nothing.
    """

    def __init__(self, models: Iterable[Any], optimizers: Iterable[Any], medic: Medic) -> None:
        self._progress = medic.progress
        is_wanted = medic.rank == 0 and medic.progress.most_layers > 0
        self._due_at = 0.0 if is_wanted else _NEVER
        self._layers = _layers(models) if is_wanted else {}
        self._handles = [
            _unwrapped(optimizer).register_step_pre_hook(lambda *_: self.measure())
            for optimizer in (optimizers if is_wanted else ())
        ]

    def measure(self) -> None:
        """Measure, if it is time to. Also for a step that is left out, as where a gradient scaler finds an overflow."""
        now = time.monotonic()
        if now < self._due_at:
            return
        self._due_at = now + _INTERVAL
        try:
            self._progress.layer_norms = self._norms()
        except Exception:  # whatever PyTorch makes of unusual gradients: the step is to go on
            log.exception("the gradient norms of the layers cannot be measured; training goes on")
            self._due_at = _NEVER

    def close(self) -> None:
        """Take the hooks off the optimizers."""
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
    """The trained parameters by layer, from the output to the input as far as the order of the modules tells it."""
    layers: dict[str, list[nn.Parameter]] = {}
    for model in models:
        if isinstance(model, nn.Module):
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    layers.setdefault(layer_of(name), []).append(parameter)
    return dict(reversed(layers.items()))


def layer_of(name: str) -> str:
    """The layer of a parameter: its name up to the first number, as in ``model.layers.7``, else its module's name."""
    parts = [part for part in name.split(".")[:-1] if part not in ("module", "_orig_mod", "_fsdp_wrapped_module")]
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts) or name


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer in a wrapper such as Accelerate's."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _local(gradient: Any) -> torch.Tensor:
    """A gradient, or this rank's shard of it: to put it together would be a call of all ranks."""
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient  # type: ignore[no-any-return]
