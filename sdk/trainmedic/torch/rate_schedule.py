"""The scheduled learning rate, independent of the optimizer's.

Most schedulers multiply the optimizer's present rate, so they adopt external changes. Their closed form does not. Of
those without one, MultiplicativeLR and ChainedScheduler also use the present rate.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, Sequence

from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from trainmedic.job.reported_values import deviation

_AGREE = 1e-3  # relative difference of equal rates
_IN_A_ROW = 3  # readings


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
        return self._agreed >= _IN_A_ROW

    def expect_followed(self) -> None:
        """Expect it at once, in a resumed training."""
        self._agreed = _IN_A_ROW

    @property
    def rate(self) -> Any:
        """Expected rate; None until the optimizer followed it. Each reading counts."""
        if self._scheduler is None:
            return None
        rate = _scheduled_rate(self._scheduler)
        if rate is None or self.is_followed:
            return rate
        apart = deviation(float(self._optimizer.param_groups[0]["lr"]), float(rate))
        self._agreed = self._agreed + 1 if apart is not None and apart < _AGREE else 0
        return rate if self.is_followed else None


def computes_as_pytorch(scheduler: Any) -> bool:
    """Return whether PyTorch's own code computes the rate."""
    kind = type(scheduler)
    if not isinstance(scheduler, lr_scheduler.LRScheduler):
        return False
    ours = {lr_scheduler.__name__, SWALR.__module__}
    return all(getattr(kind, name).__module__ in ours for name in ("step", "get_lr"))


def _schedules(scheduler: Any, optimizer: Any) -> bool:
    """Compare groups, because either may be wrapped."""
    groups: Any = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    return len(groups) > 0 and groups[0] is optimizer.param_groups[0]


def _scheduled_rate(scheduler: Any) -> Any:
    while isinstance(scheduler, lr_scheduler.SequentialLR):
        scheduler = scheduler._schedulers[bisect_right(scheduler._milestones, scheduler.last_epoch)]
    by_number = getattr(scheduler, "_get_closed_form_lr", None)
    rates = by_number() if by_number is not None else getattr(scheduler, "_last_lr", None)
    return rates[0] if rates else None
