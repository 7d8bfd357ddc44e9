"""The command ``job.scale_lr``, answered after two updates and the next boundary.

A loop may set its rate at each step, or step a scheduler unknown to `attach`. If so, the answer is ``failed`` and the
former scale is restored.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Protocol

from trainmedic.client import Medic
from trainmedic.errors import Unsupported, described
from trainmedic.job.command import JobCommand
from trainmedic.job.loss_log import LossLog
from trainmedic.job.parameters import ScaleLr
from trainmedic.recovery.changes import LEARNING_RATE, AppliedChanges
from trainmedic.torch.answer_timer import AnswerTimer
from trainmedic.torch.learning_rate import LearningRate, rate_change
from trainmedic.torch.optimizer_steps import OptimizerSteps
from trainmedic.torch.rank_agreement import on_all_ranks
from trainmedic.torch.verification import PAUSED, TOO_SLOW
from trainmedic.wire import envelope
from trainmedic.wire.log_limit import LogLimit

log = logging.getLogger("trainmedic")

_log_limit = LogLimit(lines=1)  # a minute

_UPDATES = 2  # until the answer; a scheduler unknown to `attach` changes the rate after the first
_BOUNDARIES = 16  # most step boundaries until the answer, if fewer updates are observed
_LONGEST = 30.0  # seconds until the answer
_RESERVE = 5.0  # seconds before the command expires, to deliver the answer
_NO_UPDATE = "the loop made no update since"
_NOT_OBSERVED = "no update of the optimizer was observed, now or before"
_OTHER_OPTIMIZER = (
    "the loop steps another optimizer of the same parameters, and no step of the one whose rate was scaled was "
    "observed; give attach() the optimizer that it steps"
)
_TOGETHER = "several changes were observed together"
HOW = "use the rate that step.learning_rate(value) or run.learning_rate(value) returns, or give attach() the scheduler"


class ScaledTraining(Protocol):
    @property
    def medic(self) -> Medic: ...

    @property
    def rate(self) -> LearningRate: ...

    @property
    def changes(self) -> AppliedChanges: ...

    @property
    def loss_log(self) -> LossLog: ...

    @property
    def global_step(self) -> int: ...


@dataclass(frozen=True)
class _Pending:
    command: JobCommand
    output: Mapping[str, Any]
    until: float  # ``time.monotonic``, when it must be answered


@dataclass
class _Watch:
    scale_before: float  # scale before the first pending change
    used: list[list[float]] = field(default_factory=list)  # the groups' rates, at each boundary's last update
    used_at: int = -1  # ``boundaries`` at the last update
    boundaries: int = 0  # since the last change or load
    overwritten: tuple[float, float] | None = None  # first unexpected rate, and the expected one


class RateCommands:
    """Changes of the learning rate. The timer's thread only answers: rates change at boundaries.

    ``how``: advice for loops that set their rate.
    """

    def __init__(
        self,
        training: ScaledTraining,
        steps: OptimizerSteps,
        is_paused: Callable[[], bool],
        now: Callable[[], float] = time.monotonic,
        how: str = HOW,
    ) -> None:
        self._training = training
        self._steps = steps
        self._is_paused = is_paused
        self._now = now
        self._how = how
        self.pending: list[_Pending] = []
        self.late_because = TOO_SLOW  # reason of the timer's answer
        self._watch = _Watch(1.0)
        self._timer = AnswerTimer()
        self._why_unsupported = ""  # once the loop was seen to set its rate

    def scale(self, command: JobCommand) -> None:
        """Scale the rate. Raises Refusal without scaling it."""
        rate, changes = self._training.rate, self._training.changes
        assert isinstance(command.parameters, ScaleLr)
        if command.undo_of is None and (reason := rate.why_unused()):
            raise Unsupported(reason)
        if command.undo_of is None and not self.pending:
            self._check_set_since()
        # A known scheduler may have followed a warmup of the loop's own.
        if self._why_unsupported and not (rate.is_asked_for or rate.is_scheduled or command.undo_of is not None):
            raise Unsupported(self._why_unsupported)
        factors = changes.with_factor(LEARNING_RATE, command.id, command.parameters.factor, command.undo_of)
        before, scale = rate.values, rate.scale
        try:
            on_all_ranks(command.group, lambda: rate.set_scale(math.prod(factors.values())))
        except Exception:  # different rates would make ranks diverge
            rate.set_scale(scale)
            raise
        step = self._training.global_step
        changes.set_factors(LEARNING_RATE, factors, step)
        self._training.loss_log.note_course_change(step, spares_next=True)  # the next loss precedes the update
        output = {"step": step, **rate_change(before, rate.values, rate.scale)}
        remaining = (command.expires_at - envelope.utc_now()).total_seconds() - _RESERVE
        seconds = min(_LONGEST, remaining)
        with self._timer.lock:
            self.pending = [each for each in self.pending if not each.command.is_answered]
            scale_before = self._watch.scale_before if self.pending else scale
            self.pending.append(_Pending(command, output, self._now() + seconds))
            self._begin_watch(scale_before)
            if self._is_paused():
                self._answer(PAUSED)
                return
            command.later(lambda: self.finish("the job ended"))
            self._timer.start(min(each.until for each in self.pending) - self._now(), self._answer_for_hanging_loop)

    def restart_watch(self, steps: OptimizerSteps | None = None) -> None:
        """Observe pending changes again after a load. ``steps``: a restarted loop's."""
        with self._timer.lock:
            if steps is not None:
                self._steps = steps
            if self.pending:
                self._begin_watch(self._watch.scale_before)

    def _begin_watch(self, scale_before: float) -> None:
        self._watch = _Watch(scale_before)
        self._training.rate.watch(scale_before)
        self._steps.observer = self._observe_update
        self._steps.stop_watching_others()
        if not self._steps.count:
            self._steps.watch_others()

    def step_done(self) -> None:
        with self._timer.lock:
            try:
                if self.pending:
                    self._observe_boundary()
                else:
                    self._check_set_since()
            except Exception as error:  # boundary to the user's loop
                self._cannot_observe(error)

    def _observe_boundary(self) -> None:
        watch = self._watch
        watch.boundaries += 1
        self._check_overwritten(watch)
        is_observed = self._steps.count > 0  # at all; the loop may update by other methods than `step`
        updates = len(watch.used) if is_observed else watch.boundaries
        if not watch.used:
            self._steps.watch_others()
        # The loop may have replaced an optimizer that stepped before.
        is_replaced = not watch.used and self._steps.other_count >= _UPDATES and watch.boundaries > self._steps.period
        unanswered = [each for each in self.pending if not each.command.is_answered]
        if watch.overwritten is not None or updates >= _UPDATES or is_replaced:
            self._answer("")
        elif unanswered:
            seconds = self._training.medic.progress.pace.median_step_seconds() or 0.0
            if self._now() + seconds > min(each.until for each in unanswered):
                self._answer(TOO_SLOW)
            elif watch.boundaries >= _BOUNDARIES:
                self._answer(_NO_UPDATE)

    def _check_set_since(self) -> None:
        # A loop may set its rate once per epoch, after the answer.
        training = self._training
        found = training.rate.set_since()
        if found is None or (self._why_unsupported and not found[-1]):
            return
        actual, expected, is_lost = found
        scale = training.rate.scale
        self._why_unsupported = f"the loop set the learning rate to {actual:.6g} instead of {expected:.6g}; {self._how}"
        if is_lost:
            training.changes.set_factors(LEARNING_RATE, {}, training.global_step)
            training.rate.set_scale(1.0)  # of the groups that the loop has not set
            training.loss_log.note_course_change(training.global_step, spares_next=True)
            effect = f"the factor {scale:g} is no longer active"
        else:
            effect = f"it is not known whether the factor {scale:g} is still active"
        message = f"{effect}: {self._why_unsupported}"
        log.warning("%s: %s", training.medic.job, message)
        if training.medic.records is not None:
            fields = {"message": message, "step": training.global_step}
            training.medic.records.note_detected("learning_rate", fields)

    def finish(self, because: str) -> None:
        with self._timer.lock:
            is_unanswered = any(not each.command.is_answered for each in self.pending)
            if is_unanswered or (self.pending and self._watch.overwritten is not None):  # to restore the scale
                self._answer(because)
            self._end()

    def _answer_for_hanging_loop(self) -> None:
        if any(not each.command.is_answered for each in self.pending):
            self._answer(self.late_because, is_boundary=False)

    def _observe_update(self) -> None:
        if not self.pending:
            return
        with self._timer.lock:
            watch = self._watch
            # Several updates between two boundaries, as with several optimizers, count as one.
            is_same = watch.used_at == watch.boundaries
            if is_same or len(watch.used) < _UPDATES:
                try:
                    rates = self._training.rate.values
                    self._check_overwritten(watch)
                    watch.used[len(watch.used) - is_same :] = [rates]
                    watch.used_at = watch.boundaries
                except Exception as error:  # boundary to the user's optimizer.step()
                    self._cannot_observe(error)

    def _cannot_observe(self, error: Exception) -> None:
        if _log_limit.lets_through():
            message = "%s: cannot observe the learning rate; training continues"
            log.error(message, self._training.medic.job, exc_info=error)
        if self.pending:
            self._answer(f"the rates cannot be observed: {described(error)}", is_boundary=False)
        if self._watch.overwritten is None:  # else the next boundary restores the scale
            self._end()

    def _check_overwritten(self, watch: _Watch) -> None:
        if watch.overwritten is None:
            watch.overwritten = self._training.rate.overwritten()
            if watch.overwritten is not None and (failed := self._failed()):
                # Drop the factors before `_revert` restores the rates, so that a restart does not scale again.
                training = self._training
                training.changes.set_factors(LEARNING_RATE, self._factors_without(failed), training.global_step)

    def _failed(self) -> set[str]:
        # IDs of the pending commands that fail if the loop overwrites the rate; undos do not.
        return {each.command.id for each in self.pending if each.command.undo_of is None}

    def _factors_without(self, failed: set[str]) -> dict[str, float]:
        factors = self._training.changes.factors(LEARNING_RATE)
        return {command_id: factor for command_id, factor in factors.items() if command_id not in failed}

    def _answer(self, ended_because: str, is_boundary: bool = True) -> None:
        # Answer all pending commands. ``ended_because``: why the answer is early; "" if enough was observed. After an
        # early answer observation may go on. The timer's thread, and an error, are not at a boundary: rates must stay.
        self._timer.cancel()
        watch, rate, pending = self._watch, self._training.rate, self.pending
        verified: dict[str, Any] = {"updates": len(watch.used)}
        if watch.used:
            verified["used"] = watch.used[-1][0]
        why = ended_because or ("" if self._steps.count else _NOT_OBSERVED)
        if why or len(pending) > 1:
            verified["why"] = why or _TOGETHER
        is_set_by_loop = rate.left_alone or watch.overwritten is not None
        reason = ""
        if watch.overwritten is not None:
            reason = self._revert(watch.overwritten, is_boundary)
        elif not ended_because and self._steps.other_count and not watch.used:
            # Not when an answer is late: the ranks may not be at the same boundary then.
            reason = self._revert_unused()
        for each in pending:
            self._answer_one(each, verified, reason, is_set_by_loop)
        if not ended_because or (reason and is_boundary):
            self._end()

    def _answer_one(self, pending: _Pending, verified: Mapping[str, Any], reason: str, is_set_by_loop: bool) -> None:
        command, status = pending.command, envelope.APPLIED
        output: dict[str, Any] = {**pending.output, "verified": {"learning_rate": dict(verified)}}
        if command.undo_of is None and reason:
            status, rate = envelope.FAILED, self._training.rate
            output = {**pending.output, "after": rate.value, "scale": rate.scale, "reason": reason}
        elif is_set_by_loop:
            output["left_alone"] = "the loop has set the rate by itself since, so it was not changed"
        if not command.is_answered:
            command.answer(status, output)
        elif status == envelope.FAILED and command.status == envelope.APPLIED:
            log.error("%s: %s was answered applied, but %s", self._training.medic.job, command.id, reason)

    def _revert(self, overwritten: tuple[float, float], is_boundary: bool) -> str:
        # Restores the former scale, at a boundary. Returns the reason; "" if only undos are pending.
        actual, expected = overwritten
        training = self._training
        if not self._failed():
            return ""
        reason = f"the loop set the learning rate to {actual:.6g} instead of {expected:.6g}; {self._how}"
        self._why_unsupported = reason
        if not is_boundary:
            return f"{reason}. The former scale returns at the next step boundary"
        training.rate.give_up(training.changes.scale(LEARNING_RATE))
        log.warning("%s: %s", training.medic.job, reason)
        return reason

    def _revert_unused(self) -> str:
        training, failed = self._training, self._failed()
        if not failed:
            return ""
        training.changes.set_factors(LEARNING_RATE, self._factors_without(failed), training.global_step)
        training.rate.set_scale(training.changes.scale(LEARNING_RATE))
        log.warning("%s: %s", training.medic.job, _OTHER_OPTIMIZER)
        return _OTHER_OPTIMIZER

    def _end(self) -> None:
        self.pending = []
        self._steps.observer = None
        self._steps.stop_watching_others()
