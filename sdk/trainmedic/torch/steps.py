"""One step of the training loop, as the loop sees it.

Not here: what happens at its end (``run``).
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainmedic.errors import ConfigurationError, Interrupted

if TYPE_CHECKING:
    from trainmedic.torch.run import Run


class Step:
    """The work on one batch: ``with run.step() as step:``.

    ``number`` is that of the optimizer step, from 1. Where gradients are accumulated several batches belong to
    one, and ``is_update`` is true for the last of them: only then is the optimizer to step.
    """

    __slots__ = ("_run", "is_reported", "is_update", "number")

    def __init__(self, run: Run, number: int, is_update: bool) -> None:
        self._run = run
        self.number = number
        self.is_update = is_update
        self.is_reported = False

    def backward(self, loss: torch.Tensor) -> None:
        """``loss.backward()``, for the mean over the step's batches, and scaled by the gradient scaler if any."""
        run = self._run
        if run.accumulation > 1:
            loss = loss / run.accumulation
        scaler = _scaler(run)
        if scaler is not None:
            loss = scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self, max_norm: float | None = None) -> torch.Tensor | None:
        """Where the step is complete: clip the gradients to ``max_norm``, let optimizer, gradient scaler,
        scheduler and EMA step, and forget the gradients. The norm before clipping; None where it is not.

        A scheduler that needs a metric is left to the caller.
        """
        if not self.is_update:
            return None
        run = self._run
        scaler = _scaler(run)
        optimizers = run.rate.optimizers
        if scaler is not None:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        parameters = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf") if max_norm is None else max_norm)
        if hasattr(norm, "full_tensor"):  # of sharded parameters
            norm = norm.full_tensor()
        for optimizer in optimizers:
            if scaler is not None:
                scaler.step(optimizer)
            else:
                optimizer.step()
            optimizer.zero_grad()
        if scaler is not None:
            scaler.update()
        for name, part in run.parts.by_name.items():
            kind = name.partition(".")[0]
            if kind == "scheduler" and not isinstance(part, ReduceLROnPlateau):
                part.step()
            elif kind == "ema":
                _follow(part, run.parts.by_name.get(f"model{name[len(kind) :]}"))
        return norm

    def report(self, loss: Any = None, grad_norm: Any = None, samples: float | None = None, **more: Any) -> None:
        """How it went: as `trainmedic.Medic.report`, which gets the step and the learning rates as well.

        Without ``samples`` they are worked out from the loader's batch size, where that is known.
        """
        self._run.report(self, loss, grad_norm, samples, more)
        self.is_reported = True

    def __enter__(self) -> Step:
        self._run.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        run = self._run
        run.end()
        if kind is None:
            run.complete(self)
            return False
        if issubclass(kind, Interrupted):
            run.interrupted()
            return True
        return False


def _scaler(run: Run) -> Any:
    """The gradient scaler, None without one. Raises ConfigurationError where it is not known which is meant."""
    if any(name.startswith("scaler.") for name in run.parts.by_name):
        raise ConfigurationError(
            "step.backward() and step.update() know one gradient scaler at most; with several, call them yourself"
        )
    return run.parts.by_name.get("scaler")


def _follow(ema: Any, model: Any) -> None:
    """PyTorch's AveragedModel, or the ``update(model)`` of others; of several, each that of the model of its name."""
    if model is None:
        raise ConfigurationError(
            "step.update() does not know which model an ema follows: give several by the same names, "
            "attach(model={...}, ema={...})"
        )
    if hasattr(ema, "update_parameters"):
        ema.update_parameters(model)
    else:
        ema.update(model)
