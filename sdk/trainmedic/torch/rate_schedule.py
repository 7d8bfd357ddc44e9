"""The rate that the schedule expects, to detect changes of the optimizer's.

Most schedulers multiply the optimizer's present rate and adopt changes; their closed form does not. MultiplicativeLR
and ChainedScheduler have none.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, Sequence

from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from trainmedic.job.reported_values import deviation

_TOLERANCE = 1e-3  # relative difference of equal rates
_AGREEING_READINGS = 3  # in a row, until the schedule counts as followed


class RateSchedule:
    """Schedule of an optimizer's first group.

    No rate is expected until the optimizer followed it for some readings: a loop may set its own warmup.
    """

    def __init__(self, optimizer: Any, schedulers: Sequence[Any]) -> None:
        self._optimizer = optimizer
        own = [scheduler for scheduler in schedulers if _schedules(scheduler, optimizer)]
        # With two schedulers for one rate, neither prescribes it.
        self._scheduler = own[0] if len(own) == 1 and computes_as_pytorch(own[0]) else None
        self._agreed = 0

    @property
    def is_followed(self) -> bool:
        return self._agreed >= _AGREEING_READINGS

    def expect_followed(self) -> None:
        """Expect the schedule at once, in a resumed training."""
        self._agreed = _AGREEING_READINGS

    def read_rate(self) -> Any:
        """Return the expected rate; None until enough readings agreed."""
        if self._scheduler is None:
            return None
        rate = _scheduled_rate(self._scheduler)
        if rate is None or self.is_followed:
            return rate
        difference = deviation(float(self._optimizer.param_groups[0]["lr"]), float(rate))
        self._agreed = self._agreed + 1 if difference is not None and difference < _TOLERANCE else 0
        return rate if self.is_followed else None


def closed_form(group: Any, schedulers: Sequence[Any]) -> float | None:
    """Return a group's scheduled rate, whatever rate it has; None without a single schedule's."""
    found: list[float] = []
    for scheduler in schedulers:
        groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
        number = next((number for number, each in enumerate(groups) if each is group), None)
        if number is None:
            continue
        if not computes_as_pytorch(scheduler):
            return None
        form = getattr(_active(scheduler), "_get_closed_form_lr", None)
        rates = form() if form is not None else ()
        found.append(float(rates[number]) if number < len(rates) else 0.0)  # a group added later has no entry
    # A rate of 0, as at the start of a warmup, counts as unknown: callers divide by it.
    return found[0] if len(found) == 1 and found[0] > 0.0 else None


def computes_as_pytorch(scheduler: Any) -> bool:
    """Return whether PyTorch's own code computes the rate."""
    kind = type(scheduler)
    if not isinstance(scheduler, lr_scheduler.LRScheduler):
        return False
    pytorch_modules = {lr_scheduler.__name__, SWALR.__module__}
    return all(getattr(kind, name).__module__ in pytorch_modules for name in ("step", "get_lr"))


def _schedules(scheduler: Any, optimizer: Any) -> bool:
    # Compare groups, because scheduler and optimizer may be wrapped.
    groups: Any = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    return len(groups) > 0 and groups[0] is optimizer.param_groups[0]


def _scheduled_rate(scheduler: Any) -> Any:
    scheduler = _active(scheduler)
    form = getattr(scheduler, "_get_closed_form_lr", None)
    rates = form() if form is not None else getattr(scheduler, "_last_lr", None)
    return rates[0] if rates else None


def _active(scheduler: Any) -> Any:
    while isinstance(scheduler, lr_scheduler.SequentialLR):
        scheduler = scheduler._schedulers[bisect_right(scheduler._milestones, scheduler.last_epoch)]
    return scheduler
