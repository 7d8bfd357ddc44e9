"""Health of checkpoints, and the start of a rise in the losses.

Alerts begin some scrapes after the rise, so age alone does not show a good checkpoint. `health_now` and `onset_of` read
reported tensors: training thread only.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from typing import Any, Iterable, NamedTuple, Sequence

from trainmedic.job.loss_trend import usual_level
from trainmedic.job.parameters import Rollback
from trainmedic.job.progress import Progress
from trainmedic.job.reported_values import ReportedValues, deviation, number
from trainmedic.wire import envelope

REPORTS = 100  # last ones that a loss is compared with
_SEARCHED_REPORTS = 3 * REPORTS  # last ones that are searched for a rise and for `REPORTS` usual losses before it
FEWEST = 20  # reports; with fewer nothing is unhealthy

# Limits above the median, in standard deviations and as a part of the median. The larger counts.
_Limits = tuple[float, float]
_NORMAL = 1.4826  # converts the median absolute deviation of normal noise to its standard deviation
# Normal noise exceeds six standard deviations once in 10⁹ reports, Laplace noise once in 10³. The part of 25 % is for
# nearly constant losses.
_UNHEALTHY = (6.0, 0.25)
_RAISED = (3.0, 0.1)  # around an unhealthy report in a rise: losses do not always jump at once
_NORM_FACTOR = 10.0  # a norm above ten times its median has moved the weights too far
_REFRESH, _REFRESH_FALLING = 25, 5  # reports between computations of the limits
_CALM = 3  # consecutive reports at the usual level that end a rise
_LONGEST_RISE = 300.0  # seconds; a longer rise is a new level
_OFF_SCHEDULE = 0.05  # relative deviation of the learning rate, as in the alert TrainingLearningRateOff
_BOOLEANS = ("finite", "ranks_agree", "on_schedule")  # members of `CheckpointHealth`


@dataclass(frozen=True)
class CheckpointHealth:
    """State of a training; None means unknown."""

    loss: float | None = None  # NaN if not finite
    loss_median: float | None = None  # level of the last finite losses outside a rise
    loss_spread: float | None = None  # median absolute deviation of these losses, from their trend if they fall
    grad_norm: float | None = None  # NaN if not finite
    grad_norm_median: float | None = None
    reports: int = 0  # losses behind the median
    finite: bool | None = None
    ranks_agree: bool | None = None  # True if replicated state was equal on all ranks; False only if it had been before
    on_schedule: bool | None = None  # True if the learning rate followed its schedule; None also after a long deviation

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object in which NaN is a string."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return {
            name: str(value) if isinstance(value, float) and value != value else value for name, value in values.items()
        }

    @classmethod
    def from_json(cls, members: Any) -> CheckpointHealth | None:
        """Parse `to_json`'s output, or return None."""
        if not isinstance(members, dict):
            return None
        known = {field.name: members[field.name] for field in fields(cls) if members.get(field.name) is not None}
        try:
            booleans = {name: known.pop(name) for name in _BOOLEANS if name in known}
            values: dict[str, Any] = {name: value for name, value in booleans.items() if isinstance(value, bool)}
            values["reports"] = int(known.pop("reports", 0))
            values |= {name: float(value) for name, value in known.items()}
            return cls(**values)
        except (TypeError, ValueError, OverflowError):
            return None


class Onset(NamedTuple):
    """Start of a fault; ``step`` is the first untrusted one."""

    step: int
    is_rise: bool  # of the losses; False if it is the alert's step
    shown_at: int  # first step certainly affected


def problem(health: CheckpointHealth | None) -> str:
    """Return why a checkpoint is unhealthy, or ""."""
    if health is None:
        return ""
    if health.finite is False:
        return "its weights or the optimizer's state are not all finite numbers"
    if health.ranks_agree is False:
        return "the weights or the optimizer's state were no longer the same on all ranks"
    if health.on_schedule is False:
        return "the learning rate was off its schedule"
    if health.loss is not None and not math.isfinite(health.loss):
        return "the loss was not a finite number when it was written"
    if health.reports < FEWEST:
        return ""
    if health.loss is not None and health.loss_median is not None and health.loss_spread is not None:
        limit = _limit(health.loss_median, health.loss_spread, _UNHEALTHY)
        if limit is not None and health.loss > limit:
            return (
                f"the loss was {health.loss:.4g} when it was written, against a median of {health.loss_median:.4g} "
                f"(more than {limit:.4g} is unhealthy)"
            )
    norm, usual = health.grad_norm, health.grad_norm_median
    if norm is not None and usual is not None and 0 < usual * _NORM_FACTOR < norm:
        return f"the gradient norm was {norm:.4g} when it was written, against a median of {usual:.4g}"
    return ""


def health_now(progress: Progress, finite: bool | None = None) -> CheckpointHealth:
    """Judge the training's present health, after waiting for the device."""
    record = progress.record.read()[-_SEARCHED_REPORTS:]
    rising = rise(record)
    usual = [values for values in record if rising is None or values.step < rising.shown_at][-REPORTS:]
    losses, norms = _finite(values.loss for values in usual), _finite(values.grad_norm for values in usual)
    level = usual_level(losses) if losses else None
    return CheckpointHealth(
        loss=number(progress.loss),
        loss_median=None if level is None else level.level,
        loss_spread=None if level is None else level.spread,
        grad_norm=number(progress.grad_norm),
        grad_norm_median=statistics.median(norms) if norms else None,
        reports=len(losses),
        finite=finite,
        on_schedule=_is_on_schedule(progress),
    )


def _is_on_schedule(progress: Progress) -> bool | None:
    difference = deviation(number(progress.learning_rate), number(progress.expected_learning_rate))
    if difference is None or difference <= _OFF_SCHEDULE:
        progress.off_schedule_since = None
        return None if difference is None else True
    now = time.perf_counter()
    if progress.off_schedule_since is None:
        progress.off_schedule_since = now
    return False if now - progress.off_schedule_since <= _LONGEST_RISE else None


def onset_of(rollback: Rollback, progress: Progress) -> Onset | None:
    """Return the start of the fault; None if unknown.

    It is the start of the rise that lasted when the alert began (now, if unknown), else the alert's step.
    """
    record = progress.record.read()
    if rollback.before is None:
        return rise(record)
    began = time.perf_counter() + (rollback.before - envelope.utc_now()) / timedelta(seconds=1)
    before = [values for values in record if values.at <= began]
    if not before:
        return None  # the record is too short
    rising = rise(before)
    if rising is not None:
        return rising
    last = before[-1]
    # Interpolate: between two reports there may be many steps.
    following = record[len(before)] if len(before) < len(record) else _present_position(progress, last)
    part = (began - last.at) / max(following.at - last.at, 1e-9)
    step = last.step + round(min(part, 1.0) * (following.step - last.step))
    return Onset(step, False, step)


def _present_position(progress: Progress, last: ReportedValues) -> ReportedValues:
    return ReportedValues(max(progress.step or 0, last.step), time.perf_counter(), None, None)


def rise(record: Sequence[ReportedValues]) -> Onset | None:
    """Return the rise at the end of the record.

    It begins with the first raised loss and must reach unhealthy ones.
    """
    usual = _UsualLosses()
    rising: list[ReportedValues] = []
    begins, last_step, is_unhealthy, calm = 0, None, False, 0
    for values in record:
        loss = values.loss
        if loss is None:
            continue
        is_raised = usual.is_beyond(loss, _RAISED)
        if not rising:
            begins = values.step if last_step is None else min(last_step + 1, values.step)
        last_step = values.step
        if not is_raised and not rising:
            usual.add([loss])
            continue
        rising.append(values)
        is_unhealthy = is_unhealthy or usual.is_beyond(loss, _UNHEALTHY)
        calm = 0 if is_raised else calm + 1
        has_settled = values.at - rising[0].at > _LONGEST_RISE
        if calm >= _CALM or has_settled:
            usual.add(_finite(each.loss for each in (rising if has_settled else rising[-_CALM:])))
            rising, is_unhealthy, calm = [], False, 0
    return Onset(begins, True, rising[0].step) if is_unhealthy else None


class _UsualLosses:
    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=REPORTS)
        self._limits: dict[_Limits, float | None] = {}
        self._is_falling = False
        self._added = 0  # added after the last computation of the limits, which is the slow part

    def add(self, losses: Sequence[float]) -> None:
        self._losses.extend(losses)
        self._added += len(losses)
        due = _REFRESH_FALLING if self._is_falling else _REFRESH
        if len(self._losses) >= FEWEST and (not self._limits or self._added >= due):
            self._added = 0
            usual = usual_level(self._losses)
            self._is_falling = usual.is_falling
            self._limits = {limits: _limit(usual.level, usual.spread, limits) for limits in (_UNHEALTHY, _RAISED)}

    def is_beyond(self, loss: float, limits: _Limits) -> bool:
        limit = self._limits.get(limits)
        return not math.isfinite(loss) or (limit is not None and loss > limit)


def _limit(median: float, spread: float, limits: _Limits) -> float | None:  # None if all losses are 0
    deviations, part = limits
    tolerance = max(deviations * _NORMAL * spread, part * abs(median))
    return median + tolerance if tolerance > 0 else None


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]
