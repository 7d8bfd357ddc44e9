"""Hooks on the optimizers, which find the boundaries that follow an update."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Iterator, Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainmedic.torch.optimizer_states import inner_optimizers

MOST_WITHOUT_UPDATE = 100  # boundaries before the first update, until a warning
HOOKS = "_optimizer_step_pre_hooks"  # attribute that some wrappers lack
_LONGEST_PERIOD = 256  # boundaries; bounds the wait for an update


class OptimizerSteps:
    __slots__ = (
        "_handles",
        "_last_count",
        "_optimizers",
        "_other_handle",
        "boundaries_without_update",
        "count",
        "is_hooked",
        "observer",
        "other_count",
        "period",
        "sampler",
    )

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.count = 0  # steps of all optimizers
        self.boundaries_without_update = 0  # consecutive ones, until now
        self.period = 1  # boundaries between the last two updates
        self.observer: Callable[[], None] | None = None  # called right after an update, while its rates are still set
        self.sampler: Callable[[Any], None] | None = None  # called with the optimizer right before its update
        self.other_count = 0  # steps of other optimizers, see `watch_others`
        self._last_count = 0  # at the previous boundary
        self._other_handle: Any = None
        self._optimizers = optimizers
        hooked = {id(each): each for optimizer in optimizers for each in stepping(optimizer)}.values()
        # False if an optimizer's steps cannot be observed; then nothing is counted.
        self.is_hooked = bool(hooked) and all(hasattr(each, HOOKS) for each in hooked)
        self._handles: list[Any] = []
        # A compiled update would trace the hooks, and be compiled again whenever their numbers change.
        disable: Any = torch.compiler.disable
        before, after = disable(self._before_step), disable(self._after_step)
        for each in hooked if self.is_hooked else ():
            self._handles.append(each.register_step_pre_hook(before))
            self._handles.append(each.register_step_post_hook(after))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.stop_watching_others()

    def watch_others(self) -> None:
        """Count other optimizers' steps on these parameters."""
        if self.is_hooked and self._other_handle is None:
            self.other_count = 0
            disable: Any = torch.compiler.disable
            self._other_handle = register_optimizer_step_pre_hook(disable(self._before_any_step))

    def stop_watching_others(self) -> None:
        if self._other_handle is not None:
            self._other_handle.remove()
            self._other_handle = None

    def step_ends(self) -> bool:
        """Record a boundary; return whether it follows an update, or one is overdue."""
        if self.count != self._last_count:
            self._last_count = self.count
            self.period = min(self.boundaries_without_update + 1, _LONGEST_PERIOD)
            self.boundaries_without_update = 0
            return True
        self.boundaries_without_update += 1
        # Do not wait if the loop skips an update, as for a NaN loss.
        return self.boundaries_without_update >= self.period

    def _before_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        self.count += 1
        if self.sampler is not None:
            self.sampler(optimizer)

    def _before_any_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        # Inner ones may have been made since, and a wrapper of the same groups uses the same rates.
        own = [*self._optimizers, *(inner for each in self._optimizers for _, inner in inner_optimizers(each))]
        groups, others = [*_groups_of(own)], [*_groups_of([optimizer])]
        is_own = any(each is optimizer for each in own) or not _ids(groups).isdisjoint(_ids(others))
        has_same = not _ids(_parameters_in(groups)).isdisjoint(_ids(_parameters_in(others)))
        self.other_count += has_same and not is_own

    def _after_step(self, optimizer: Any, arguments: Any, options: Any) -> None:
        observer = self.observer  # another thread may clear it
        if observer is not None:
            observer()


def has_gradients(optimizers: Sequence[Any]) -> bool:
    return any(parameter.grad is not None for parameter in _parameters_in(_groups_of(optimizers)))


def _groups_of(optimizers: Iterable[Any]) -> Iterator[Any]:
    return (group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ()))


def _parameters_in(groups: Iterable[Any]) -> Iterator[Any]:
    return (parameter for group in groups for parameter in group["params"])


def _ids(members: Iterable[Any]) -> set[int]:
    return set(map(id, members))


def stepping(optimizer: Any) -> list[Any]:
    # The innermost ones, of which each may step; all if they refer to each other.
    found, innermost, is_tree = [optimizer], [], True
    for each in found:
        inner = _inner(each)
        new = [one for one in inner if not any(one is other for other in found)]
        is_tree = is_tree and len(new) == len(inner)
        found.extend(new)
        if not inner:
            innermost.append(each)
    return innermost if is_tree else found


def _inner(optimizer: Any) -> list[torch.optim.Optimizer]:
    for name in ("optimizer", "optim"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, torch.optim.Optimizer) and inner is not optimizer:
            return [inner]
    # The loop may call another method of the outer optimizer than `step`, as with SAM. This method steps the inner one,
    # or several that share its groups among them.
    groups = _ids(getattr(optimizer, "param_groups", ()))
    inner_ones = {id(inner): inner for _, inner in inner_optimizers(optimizer) if inner is not optimizer}
    whole = [inner for inner in inner_ones.values() if _ids(inner.param_groups) == groups]
    parts = list(inner_ones.values())
    have_all = bool(parts) and sorted(map(id, _groups_of(parts))) == sorted(groups)
    return whole or (parts if have_all else [])
