"""The learning rate that the schedule prescribes now, whatever the optimizer has.

Many of PyTorch's schedulers compute the next rate from the one that they find in the optimizer, so they take over a
rate that was changed there, and their last rate proves nothing. Most of them can also compute the rate of a step from
its number, which is used here. MultiplicativeLR and ChainedScheduler cannot; of them only a change since their last
step is seen.

Not here: changing a rate (``learning_rate``), how far two of them are apart (``trainmedic.job.reported_values``).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, Sequence

from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from trainmedic.job.reported_values import deviation

_AGREE = 1e-3  # rates that differ by less, as a part of the larger one, are the same
_IN_A_ROW = 3  # readings


class RateSchedule:
    """The schedule of an optimizer's first group, found among `schedulers`, those that the loop steps itself.

    A loop may set the rate by hand for a while, as for a warmup, and mean it. So no rate is expected before the
    optimizer's was on its schedule for some readings in a row.
    """

    def __init__(self, optimizer: Any, schedulers: Sequence[Any]) -> None:
        self._optimizer = optimizer
        own = [scheduler for scheduler in schedulers if _moves(scheduler, optimizer)]
        # If two schedulers change the same rate, neither prescribes it.
        self._scheduler = own[0] if len(own) == 1 and computes_as_pytorch(own[0]) else None
        self._agreed = 0

    @property
    def is_followed(self) -> bool:
        """Whether the optimizer's rate has been on it for long enough, so that one that is off it is off."""
        return self._agreed >= _IN_A_ROW

    def was_followed(self) -> None:
        """Say that it was followed by the process that this one goes on for: a rate that is off it already is off."""
        self._agreed = _IN_A_ROW

    @property
    def rate(self) -> Any:
        """The rate, a number or tensor; None where no schedule says it, or the optimizer's was not on it yet."""
        if self._scheduler is None:
            return None
        rate = _scheduled_rate(self._scheduler)
        if rate is None or self.is_followed:
            return rate
        apart = deviation(float(self._optimizer.param_groups[0]["lr"]), float(rate))
        self._agreed = self._agreed + 1 if apart is not None and apart < _AGREE else 0
        return rate if self.is_followed else None


def computes_as_pytorch(scheduler: Any) -> bool:
    """Whether it computes as PyTorch's own schedulers do; subclasses that only add to them count."""
    kind = type(scheduler)
    if not isinstance(scheduler, lr_scheduler.LRScheduler):
        return False
    ours = {lr_scheduler.__name__, SWALR.__module__}
    return all(getattr(kind, name).__module__ in ours for name in ("step", "get_lr"))


def _moves(scheduler: Any, optimizer: Any) -> bool:
    """Whether they belong together; either may be wrapped."""
    groups: Any = getattr(getattr(scheduler, "optimizer", None), "param_groups", ())
    return len(groups) > 0 and groups[0] is optimizer.param_groups[0]


def _scheduled_rate(scheduler: Any) -> Any:
    """The rate of the scheduler's present step, computed from the step's number if the scheduler can do that."""
    while isinstance(scheduler, lr_scheduler.SequentialLR):
        scheduler = scheduler._schedulers[bisect_right(scheduler._milestones, scheduler.last_epoch)]
    by_number = getattr(scheduler, "_get_closed_form_lr", None)
    rates = by_number() if by_number is not None else getattr(scheduler, "_last_lr", None)
    return rates[0] if rates else None
