"""Hooks on the optimizers: how often they step, with which rates, and which boundaries are updates.

A loop may accumulate gradients without saying so (``if i % 4 == 0: optimizer.step()``). Between two updates there are
gradients that no checkpoint holds, so only a boundary after an update is a place to save or to go back at. Who calls
it: the step boundary. Not here: declared accumulation (``Step.is_update``).
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch

SILENT = 100
"""Steps without any update after which a loop is said to train nothing."""
_HOOKS = "_optimizer_step_pre_hooks"
"""What `register_step_pre_hook` needs. A wrapper that does not call the constructor of its base class lacks it."""
_MOST = 256
"""Largest number of steps that is taken for one accumulation."""


class OptimizerSteps:
    """The steps of one training's optimizers."""

    __slots__ = ("_handles", "_last", "count", "observer", "period", "sampler", "without", "works")

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.count = 0
        """Steps of the first optimizer so far, and of the others."""
        self.without = 0
        """Boundaries in a row without an update."""
        self.period = 1
        """Boundaries from the last update but one to the last."""
        self.observer: Callable[[], None] | None = None
        """Called right after an update, while the optimizers have the rates that it has used. Before it, a closure may
        still set them."""
        self.sampler: Callable[[Any], None] | None = None
        """Called right before an update, with the optimizer that is about to step."""
        self._last = 0
        innermost = [_innermost(each) for each in optimizers]
        self.works = bool(innermost) and all(hasattr(each, _HOOKS) for each in innermost)
        """Whether the optimizers can be observed."""
        self._handles: list[Any] = []
        for each in innermost if self.works else ():
            self._handles += [each.register_step_pre_hook(self._steps), each.register_step_post_hook(self._stepped)]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def step_ends(self) -> bool:
        """Note a boundary. Return whether it is one after an update, or no update is to be waited for."""
        if self.count != self._last:
            self._last = self.count
            self.period, self.without = min(self.without + 1, _MOST), 0
            return True
        self.without += 1
        # A loop that skips an update, as for a loss that is no number, waits for none.
        return self.without >= self.period

    def _steps(self, optimizer: Any, arguments: Any, options: Any) -> None:
        self.count += 1
        if self.sampler is not None:
            self.sampler(optimizer)

    def _stepped(self, optimizer: Any, arguments: Any, options: Any) -> None:
        if self.observer is not None:
            self.observer()


def has_gradients(optimizers: Sequence[Any]) -> bool:
    """Return whether any parameter has a gradient, which an update has not used yet or has left."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return any(parameter.grad is not None for group in groups for parameter in group["params"])


def _innermost(optimizer: Any) -> Any:
    """Return the optimizer in a wrapper, such as Accelerate's, or PyTorch's of local SGD."""
    while (inner := _inner(optimizer)) is not None:
        optimizer = inner
    return optimizer


def _inner(optimizer: Any) -> torch.optim.Optimizer | None:
    for name in ("optimizer", "optim"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, torch.optim.Optimizer) and inner is not optimizer:
            return inner
    return None
