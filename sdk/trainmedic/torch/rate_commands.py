"""The command ``job.scale_lr`` in a plain loop, answered once the rate that the next updates use was seen.

A loop may set its rate at each step (``group["lr"] = lr``), or step a scheduler that `attach` was not given. Then a
rate that was written lasts for one step at most. So the answer waits for two updates and the boundary after them. If
the loop has set another rate, the answer is ``failed``, the scale is as before, and nothing is multiplied. Such a loop
asks for the factor by `Run.learning_rate`. Not here: writing the rates (``learning_rate``).
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping

from trainmedic.errors import Unsupported
from trainmedic.job.command import JobCommand
from trainmedic.job.parameters import ScaleLr
from trainmedic.recovery.changes import LEARNING_RATE
from trainmedic.torch.answer_timer import AnswerTimer
from trainmedic.torch.learning_rate import rate_change
from trainmedic.torch.optimizer_steps import OptimizerSteps
from trainmedic.torch.rank_agreement import on_all_ranks
from trainmedic.torch.training_state import TrainingState
from trainmedic.torch.verification import PAUSED, TOO_SLOW
from trainmedic.wire import envelope

log = logging.getLogger("trainmedic")

_UPDATES = 2
"""Updates that an answer waits for: a scheduler that attach() was not given moves the rate after the first."""
_BOUNDARIES = 16
"""Boundaries without an update after which no more is waited for."""
_LONGEST, _RESERVE = 30.0, 5.0  # seconds, as in ``verification``
_NO_UPDATE = "the loop made no update since"
HOW = "use the rate that step.learning_rate(value) or run.learning_rate(value) returns, or give attach() the scheduler"


@dataclass
class _Pending:
    """A change whose effect was not seen yet."""

    command: JobCommand
    output: Mapping[str, Any]
    factors_before: Mapping[str, float]
    scale_before: float
    until: float
    used: list[list[float]] = field(default_factory=list)
    """The groups' rates at each update since."""
    boundaries: int = 0
    overwritten: tuple[float, float] | None = None
    """The first rate that was found instead of the expected one, and that."""


class RateCommands:
    """Changes of the learning rate in one training: one that waits at most. For the training thread."""

    def __init__(
        self,
        training: TrainingState,
        steps: OptimizerSteps,
        is_paused: Callable[[], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._training = training
        self._steps = steps
        self._is_paused = is_paused
        self._now = now
        self._pending: _Pending | None = None
        self._timer = AnswerTimer()
        self._sets_itself = ""  # the reason why a rate does not last, once that was seen

    @property
    def waits(self) -> bool:
        """Whether the effect of a change was not seen yet."""
        return self._pending is not None

    def scale(self, command: JobCommand) -> None:
        """Carry out the command. Raises Refusal; nothing is changed then."""
        rate, changes = self._training.rate, self._training.changes
        assert isinstance(command.parameters, ScaleLr)
        self.finish("another change of the rate was ordered")
        if self._sets_itself and not rate.is_asked_for and command.undo_of is None:
            raise Unsupported(self._sets_itself)
        factors_before = changes.factors(LEARNING_RATE)
        factors = changes.with_factor(LEARNING_RATE, command.id, command.parameters.factor, command.undo_of)
        before, scale = rate.values, rate.scale
        try:
            on_all_ranks(command.group, lambda: rate.set_scale(math.prod(factors.values())))
        except Exception:  # ranks with different learning rates would drift apart
            rate.set_scale(scale)
            raise
        changes.set_factors(LEARNING_RATE, factors, self._training.global_step)
        self._training.loss_log.course_changes(self._training.global_step)
        output = {"step": self._training.global_step, **rate_change(before, rate.values, rate.scale)}
        remaining = (command.expires_at - envelope.utc_now()).total_seconds() - _RESERVE
        until = self._now() + min(_LONGEST, remaining)
        self._pending = _Pending(command, output, factors_before, scale, until)
        rate.watch(scale)
        self._steps.observer = self._update
        if self._is_paused():
            self._answer(PAUSED)
        else:
            command.later(lambda: self.finish("the job ended"))
            self._timer.start(min(_LONGEST, remaining), self._time_is_up)

    def step_done(self) -> None:
        """Look at the rates after a step, and answer when enough was seen."""
        if self._pending is not None:
            with self._timer.lock:
                self._look_after_step(self._pending)

    def _look_after_step(self, pending: _Pending) -> None:
        pending.boundaries += 1
        self._look(pending)
        updates = len(pending.used) if self._steps.works else pending.boundaries
        if pending.overwritten is not None or updates >= _UPDATES:
            self._answer("")
        elif not pending.command.is_answered:
            seconds = self._training.medic.progress.pace.median_step_seconds() or 0.0
            if self._now() + seconds > pending.until:
                self._answer(TOO_SLOW)
            elif pending.boundaries >= _BOUNDARIES:
                self._answer(_NO_UPDATE)

    def finish(self, because: str) -> None:
        """Answer with what was seen by now, and look no further; ``because`` says why."""
        with self._timer.lock:
            if self._pending is not None and not self._pending.command.is_answered:
                self._answer(because)
            self._end()

    def _time_is_up(self) -> None:
        """The loop hangs. Called in the timer's thread."""
        if self._pending is not None and not self._pending.command.is_answered:
            self._answer(TOO_SLOW)

    def _update(self) -> None:
        """Note the rates of an update, right before it."""
        pending = self._pending
        if pending is not None and len(pending.used) < _UPDATES:
            pending.used.append(self._training.rate.values)
            self._look(pending)

    def _look(self, pending: _Pending) -> None:
        if pending.overwritten is None:
            pending.overwritten = self._training.rate.overwritten()

    def _answer(self, ended_because: str) -> None:
        """Answer. Without enough updates the effect is watched further, for a correction in the log."""
        pending = self._pending
        assert pending is not None
        self._timer.cancel()
        command, rate = pending.command, self._training.rate
        verified: dict[str, Any] = {"updates": len(pending.used)}
        if pending.used:
            verified["used"] = pending.used[-1][0]
        if ended_because:
            verified["why"] = ended_because
        output: dict[str, Any] = {**pending.output, "verified": {"learning_rate": verified}}
        status = envelope.APPLIED
        is_own = rate.left_alone or pending.overwritten is not None
        if command.undo_of is None and pending.overwritten is not None:
            status, output = self._give_up(pending, output)
        elif is_own:
            output["left_alone"] = "the loop has set the rate by itself since, so it was not changed"
        if not command.is_answered:
            command.answer(status, output)
        elif status == envelope.FAILED:
            log.error("%s: %s was answered applied, but %s", self._training.medic.job, command.id, output["reason"])
        if not ended_because or status == envelope.FAILED:
            self._end()

    def _give_up(self, pending: _Pending, output: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The loop sets the rate by itself: take the scale back, without touching that rate."""
        assert pending.overwritten is not None
        actual, expected = pending.overwritten
        training = self._training
        reason = f"the loop set the learning rate to {actual:.6g}, and {expected:.6g} was to be used; {HOW}"
        self._sets_itself = reason
        training.rate.give_up(pending.scale_before)
        training.changes.set_factors(LEARNING_RATE, pending.factors_before, training.global_step)
        log.warning("%s: %s", training.medic.job, reason)
        output = {name: value for name, value in output.items() if name != "verified"}  # nothing stays changed
        used = training.rate.value
        return envelope.FAILED, {**output, "after": used, "scale": pending.scale_before, "reason": reason}

    def _end(self) -> None:
        self._pending = None
        self._steps.observer = None
