from __future__ import annotations

import inspect
from types import TracebackType
from typing import Any, Callable

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainmedic.errors import ConfigurationError, Interrupted
from trainmedic.torch.boundary import StepBoundary
from trainmedic.torch.state_parts import StateParts


class Step:
    """The work on one batch. ``number`` is the optimizer step's, from 1."""

    __slots__ = ("_accelerated", "_boundary", "_completes_step", "is_reported", "number")

    def __init__(self, boundary: StepBoundary, number: int, is_update: bool) -> None:
        self._boundary = boundary
        self.number = number
        self._accelerated = boundary.training.accelerated
        self._completes_step = is_update
        self.is_reported = False

    @property
    def is_update(self) -> bool:
        """True if the optimizer is to step after this batch. With Accelerate, read it in ``accelerator.accumulate``."""
        return self._accelerated.is_update if self._accelerated.leads else self._completes_step

    def backward(self, loss: torch.Tensor) -> None:
        """Call ``loss.backward()`` for the mean over the step's batches, with any gradient scaler."""
        training = self._boundary.training
        if training.accumulation > 1 and not self._accelerated.leads:
            loss = loss / training.accumulation
        if self._accelerated.exists:
            self._accelerated.backward(loss)
            return
        scaler = _gradient_scaler(training.parts)
        if scaler is not None:
            loss = scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self, max_norm: float | None = None) -> torch.Tensor | None:
        """Clip gradients, step optimizer, gradient scaler, scheduler and EMA, and clear the gradients, on a step's last
        batch.

        Returns the norm before clipping; None for other batches. Schedulers that need a metric are not stepped.
        """
        if not self.is_update:
            return None
        training = self._boundary.training
        parts = training.parts
        if self._accelerated.exists:
            return self._update_accelerated(max_norm)
        scaler = _gradient_scaler(parts)
        optimizers = training.rate.optimizers
        if scaler is not None:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        parameters = training.rate.parameters()
        self._boundary.layer_norms.measure()  # before clipping
        norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf") if max_norm is None else max_norm)
        if hasattr(norm, "full_tensor"):  # sharded parameters
            norm = norm.full_tensor()
        for optimizer in optimizers:
            if scaler is not None:
                scaler.step(optimizer)
            else:
                optimizer.step()
            optimizer.zero_grad()
        if scaler is not None:
            scaler.update()
        _step_schedulers_and_emas(parts)
        return norm

    def _update_accelerated(self, max_norm: float | None) -> torch.Tensor:
        rate = self._boundary.training.rate
        # With a scaler clipping unscales the gradients, so `LayerNorms` measures them after it, before the step.
        if self._accelerated.scaler is None:
            self._boundary.layer_norms.measure()
        norm: torch.Tensor = self._accelerated.clip(rate.parameters(), float("inf") if max_norm is None else max_norm)
        self._accelerated.step(rate.optimizers)
        _step_schedulers_and_emas(self._boundary.training.parts)
        return norm

    def learning_rate(self, value: Any) -> Any:
        return self._boundary.training.rate.scaled(value)

    def report(self, loss: Any = None, grad_norm: Any = None, samples: float | None = None, **more: Any) -> None:
        """Report the step with learning rates; see `trainmedic.Medic.report`."""
        self._boundary.report(self.number, self.is_update, loss, grad_norm, samples, more)
        self.is_reported = True

    def __enter__(self) -> Step:
        fetch_order = self._boundary.training.fetch_order
        if not fetch_order.is_decided:
            fetch_order.step_began()
        if not self._boundary.scheduler_order.is_decided:
            self._boundary.scheduler_order.step_begins()
        self._boundary.allow_interrupts()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        boundary = self._boundary
        boundary.forbid_interrupts()
        fetch_order = boundary.training.fetch_order
        if not fetch_order.is_decided:
            fetch_order.step_ended()
        if kind is None:
            boundary.complete(self.number, self.is_update, self.is_reported)
            if not boundary.scheduler_order.is_decided:
                boundary.scheduler_order.step_ended()
            return False
        if issubclass(kind, Interrupted):
            boundary.step_was_interrupted()
            return True
        boundary.step_failed(kind)
        return False


def _gradient_scaler(parts: StateParts) -> Any:
    """Return the only gradient scaler, or None. Raises ConfigurationError."""
    if any(name.startswith("scaler.") for name in parts.by_name):
        raise ConfigurationError(
            "step.backward() and step.update() support one gradient scaler; with several, call them yourself"
        )
    return parts.by_name.get("scaler")


def _step_schedulers_and_emas(parts: StateParts) -> None:
    for name, part in parts.by_name.items():
        kind = name.partition(".")[0]
        if kind == "scheduler" and not isinstance(part, ReduceLROnPlateau):
            part.step()
        elif kind == "ema":
            model = parts.by_name.get(f"model{name[len(kind) :]}")
            if model is None:
                raise ConfigurationError(
                    "step.update() does not know which model an ema follows: name several alike, "
                    "attach(model={...}, ema={...})"
                )
            update_average(part, model)


def update_average(ema: Any, model: Any) -> None:
    """Call PyTorch's ``update_parameters(model)`` or others' ``update(model)``, ``update(parameters)``,
    ``step(parameters)`` or ``update()``.

    Raises ConfigurationError.
    """
    if hasattr(ema, "update_parameters"):
        ema.update_parameters(model)
        return
    name = next((name for name in ("update", "step") if hasattr(ema, name)), None)
    if name is None:
        raise ConfigurationError(f"step.update() cannot update a {type(ema).__name__}: do it yourself")
    update: Callable[..., Any] = getattr(ema, name)
    first = next(iter(inspect.signature(update).parameters.values()), None)
    if first is not None and first.name.startswith("param"):
        update(model.parameters())
    elif first is None or first.default is not first.empty:
        update()  # such an average holds its model
    else:
        update(model)
