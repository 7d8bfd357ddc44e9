"""What a checkpoint is judged by, and since when the losses of a job have risen.

A checkpoint that was written after the trouble began is no place to go back to, and its age alone does not tell: an
alert begins some scrapes after the loss has jumped. So each checkpoint carries a `CheckpointHealth`, small enough to
stand in its mark, by which it is judged without being loaded; and a rollback looks at the losses that the job has
reported for the step at which they began to rise (`rise`).

An integration uses it so::

    health = health_now(medic.progress, finite=...)      # when it writes a checkpoint
    mark_complete(path, {..., "health": health.to_json()})
    SavedCheckpoint(step, at, path, health=CheckpointHealth.from_json(facts.get("health")))

    onset = onset_of(rollback, medic.progress)           # when it is to go back, see ``choice``
    medic.progress.record.forget_after(step)             # when it has gone back to that step

Only the training thread calls `health_now` and `onset_of`: they read reported tensors, and so wait for their device.
Not here: which checkpoint is chosen (``choice``), and whether weights are finite (the integrations).
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

REPORTS = 100
"""So many of the last reports are what a loss is compared with."""
_LOOKED_AT = 3 * REPORTS  # of a checkpoint's health: those before a rise have to be among them
FEWEST = 20
"""With fewer reports nothing is known of the usual spread, and nothing is called ill."""

_Factors = tuple[float, float]
"""How far a loss may lie above the median: in standard deviations, and as a part of it; the larger one counts."""
_NORMAL = 1.4826  # times the median absolute deviation, that is the standard deviation of normal noise
_ILL = (6.0, 0.25)
"""A loss is ill when it lies above its median by more than six standard deviations, and by more than a quarter of it.

Normal noise exceeds the first once in a thousand million reports, noise with the heavy tails of Laplace's distribution
once in a thousand. The second holds where the spread is next to nothing, as with one batch over and over. To call a
good checkpoint ill costs the steps to the one before; to call an ill one good costs the repair."""
_RAISED = (3.0, 0.1)
"""The same for the reports around an ill one that belong to the same rise: a loss does not always jump at once."""
_NORM_FACTOR = 10.0
"""A gradient norm of more than ten times its median has moved the weights further than training does."""
_REFRESH, _REFRESH_FALLING = 25, 5
"""Reports after which the limits are worked out again; while losses fall, their level falls from one to the next."""
_CALM = 3  # reports in a row at the usual level, which end a rise
_LONGEST_RISE = 300.0
"""Seconds. Alerts begin within that time; losses that are higher for longer are the new level, as of other data."""
_OFF_SCHEDULE = 0.05
"""How far the learning rate may be from its schedule, as a part of the larger one: the alert TrainingLearningRateOff's
limit."""
_SAID = ("finite", "ranks_agree", "on_schedule")
"""The members of a health that are true or false."""


@dataclass(frozen=True)
class CheckpointHealth:
    """What was known of a training when a checkpoint was written. None is what was not known."""

    loss: float | None = None
    """The loss that was reported last; NaN if it was no finite number."""
    loss_median: float | None = None
    """The level of the last losses that were finite numbers and belong to no rise that lasts: their median, or where
    they fall the median of the newest (see `trainmedic.job.loss_trend.usual_level`)."""
    loss_spread: float | None = None
    """Their median absolute deviation, where they fall from their own trend."""
    grad_norm: float | None = None
    """The gradient norm that was reported last; NaN if it was no finite number, which is usual in half precision."""
    grad_norm_median: float | None = None
    """The median of the last gradient norms that were finite numbers."""
    reports: int = 0
    """How many losses the median is of."""
    finite: bool | None = None
    """Whether all weights, and all numbers of the optimizer's state, are finite."""
    ranks_agree: bool | None = None
    """Whether the weights and the optimizer's state were the same on all ranks, of which each has all of them; False
    only where they had been before, see ``trainmedic.torch.checkpoints.rank_comparison``."""
    on_schedule: bool | None = None
    """Whether the learning rate was that of its schedule; None, too, where it has been off for so long that it may be
    meant."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, in which a NaN is a text."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return {
            name: str(value) if isinstance(value, float) and value != value else value for name, value in values.items()
        }

    @classmethod
    def from_json(cls, members: Any) -> CheckpointHealth | None:
        """What `to_json` gave; None for anything else, such as the mark of an earlier version."""
        if not isinstance(members, dict):
            return None
        known = {field.name: members[field.name] for field in fields(cls) if members.get(field.name) is not None}
        try:
            said = {name: known.pop(name) for name in _SAID if name in known}
            values: dict[str, Any] = {name: value for name, value in said.items() if isinstance(value, bool)}
            values["reports"] = int(known.pop("reports", 0))
            values |= {name: float(value) for name, value in known.items()}
            return cls(**values)
        except (TypeError, ValueError, OverflowError):
            return None


class Onset(NamedTuple):
    """From which step on the training was in trouble."""

    step: int
    """The first step that is not trusted."""
    is_rise: bool
    """Whether the losses show it; otherwise it is the step at which the alert began."""
    shown_at: int
    """The first step of which it is certain: there may be many between two reports."""


def problem(health: CheckpointHealth | None) -> str:
    """Why a checkpoint is ill; empty where nothing shows that it is, for what is not known is not ill."""
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
        limit = _limit(health.loss_median, health.loss_spread, _ILL)
        if limit is not None and health.loss > limit:
            return (
                f"the loss was {health.loss:.4g} when it was written, against a median of {health.loss_median:.4g} "
                f"(more than {limit:.4g} is ill)"
            )
    norm, usual = health.grad_norm, health.grad_norm_median
    if norm is not None and usual is not None and 0 < usual * _NORM_FACTOR < norm:
        return f"the gradient norm was {norm:.4g} when it was written, against a median of {usual:.4g}"
    return ""


def health_now(progress: Progress, finite: bool | None = None) -> CheckpointHealth:
    """The health of a checkpoint that is written now. ``finite``: see `CheckpointHealth.finite`.

    It reads what was reported, which waits for the device that holds it.
    """
    record = progress.record.read()[-_LOOKED_AT:]
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
    apart = deviation(number(progress.learning_rate), number(progress.expected_learning_rate))
    if apart is None or apart <= _OFF_SCHEDULE:
        progress.off_schedule_since = None
        return None if apart is None else True
    now = time.perf_counter()
    progress.off_schedule_since = progress.off_schedule_since or now
    return False if now - progress.off_schedule_since <= _LONGEST_RISE else None


def onset_of(rollback: Rollback, progress: Progress) -> Onset | None:
    """From which step on the training was in trouble, as the rollback and the job's losses say; None if they do not.

    The rise that lasted when the alert began; without an alert's time, the one that lasts now.
    """
    record = progress.record.read()
    if rollback.before is None:
        return rise(record)
    began = time.perf_counter() + (rollback.before - envelope.utc_now()) / timedelta(seconds=1)
    before = [values for values in record if values.at <= began]
    if not before:
        return None  # the record does not go back that far
    rising = rise(before)
    if rising is not None:
        return rising
    last = before[-1]
    # Between two reports there may be many steps.
    until = record[len(before)] if len(before) < len(record) else _latest(progress, last)
    part = (began - last.at) / max(until.at - last.at, 1e-9)
    step = last.step + round(min(part, 1.0) * (until.step - last.step))
    return Onset(step, False, step)


def _latest(progress: Progress, last: ReportedValues) -> ReportedValues:
    """Where training is now, after its last report."""
    return ReportedValues(max(progress.step or 0, last.step), time.perf_counter(), None, None)


def rise(record: Sequence[ReportedValues]) -> Onset | None:
    """The rise of the losses that lasts at the end of the record; None without one.

    A rise begins with the first raised loss and must come to ill ones. Each report is compared with those before the
    rise, so that a long one does not become what is usual.
    """
    usual = _UsualLosses()
    rising: list[ReportedValues] = []
    begins, last_step, is_ill, calm = 0, None, False, 0
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
        is_ill = is_ill or usual.is_beyond(loss, _ILL)
        calm = 0 if is_raised else calm + 1
        has_settled = values.at - rising[0].at > _LONGEST_RISE
        if calm >= _CALM or has_settled:
            usual.add(_finite(each.loss for each in (rising if has_settled else rising[-_CALM:])))
            rising, is_ill, calm = [], False, 0
    return Onset(begins, True, rising[0].step) if is_ill else None


class _UsualLosses:
    """The last losses that belong to no rise, and the limits that follow from them."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=REPORTS)
        self._limits: dict[_Factors, float | None] = {}
        self._is_falling = False
        self._added = 0  # since the limits were worked out, which takes longer than all the rest

    def add(self, losses: Sequence[float]) -> None:
        self._losses.extend(losses)
        self._added += len(losses)
        due = _REFRESH_FALLING if self._is_falling else _REFRESH
        if len(self._losses) >= FEWEST and (not self._limits or self._added >= due):
            self._added = 0
            usual = usual_level(self._losses)
            self._is_falling = usual.is_falling
            self._limits = {factors: _limit(usual.level, usual.spread, factors) for factors in (_ILL, _RAISED)}

    def is_beyond(self, loss: float, factors: _Factors) -> bool:
        limit = self._limits.get(factors)
        return not math.isfinite(loss) or (limit is not None and loss > limit)


def _limit(median: float, spread: float, factors: _Factors) -> float | None:
    """The loss above which it is more than chance; None where there is no spread and no size to tell it by."""
    deviations, part = factors
    room = max(deviations * _NORMAL * spread, part * abs(median))
    return median + room if room > 0 else None


def _finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]
