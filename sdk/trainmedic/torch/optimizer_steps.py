"""Hooks on the optimizers: number of steps, used rates, and boundaries after updates."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch

SILENT = 100
"""Steps without an update until a warning."""
_HOOKS = "_optimizer_step_pre_hooks"
"""Attribute that some wrappers lack."""
_MOST = 256


class OptimizerSteps:
    __slots__ = ("_handles", "_last", "count", "observer", "period", "sampler", "without", "works")

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.count = 0
        """Steps of all optimizers."""
        self.without = 0
        """Consecutive boundaries without an update."""
        self.period = 1
        """Boundaries between the last two updates."""
        self.observer: Callable[[], None] | None = None
        """Called right after an update, with the rates it used."""
        self.sampler: Callable[[Any], None] | None = None
        """Called with the optimizer right before its update."""
        self._last = 0
        innermost = [_innermost(each) for each in optimizers]
        self.works = bool(innermost) and all(hasattr(each, _HOOKS) for each in innermost)
        self._handles: list[Any] = []
        for each in innermost if self.works else ():
            self._handles += [each.register_step_pre_hook(self._steps), each.register_step_post_hook(self._stepped)]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def step_ends(self) -> bool:
        """Record a boundary; return whether it follows an update or none is awaited."""
        if self.count != self._last:
            self._last = self.count
            self.period = self.without + 1 if self.without < _MOST else _MOST
            self.without = 0
            return True
        self.without += 1
        # Do not wait if the loop skips an update, as for a NaN loss.
        return self.without >= self.period

    def _steps(self, optimizer: Any, arguments: Any, options: Any) -> None:
        self.count += 1
        if self.sampler is not None:
            self.sampler(optimizer)

    def _stepped(self, optimizer: Any, arguments: Any, options: Any) -> None:
        if self.observer is not None:
            self.observer()


def has_gradients(optimizers: Sequence[Any]) -> bool:
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return any(parameter.grad is not None for group in groups for parameter in group["params"])


def _innermost(optimizer: Any) -> Any:
    while (inner := _inner(optimizer)) is not None:
        optimizer = inner
    return optimizer


def _inner(optimizer: Any) -> torch.optim.Optimizer | None:
    for name in ("optimizer", "optim"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, torch.optim.Optimizer) and inner is not optimizer:
            return inner
    return None
