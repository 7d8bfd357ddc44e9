"""Answer to a rollback, after comparing repeated batches and losses.

``applied`` if none differs within the time limit. `JobReports.rollback_did_not_hold` reports a later difference.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Protocol

from trainmedic.client import Medic
from trainmedic.job.command import JobCommand
from trainmedic.job.loss_log import FEWEST, NOTHING, LossComparison
from trainmedic.recovery.batch_log import BatchComparison, BatchLog
from trainmedic.recovery.fingerprints import fingerprint
from trainmedic.torch import randomness
from trainmedic.torch.answer_timer import AnswerTimer
from trainmedic.wire import envelope

log = logging.getLogger("trainmedic")

_LONGEST = 30.0  # most seconds until the answer, after a few compared losses
_LONGEST_FOR_LOSSES = 90.0  # the same without them
_RESERVE = 5.0  # seconds before the command expires, to deliver the answer
PAUSED = "the training is paused"
TOO_SLOW = "the next batches would have come too late for the answer"
EPOCHS_ENDED = "batches(epochs=...) ended, and the loop drew no further batch before the answer was due"
_EITHER_COURSE = (
    "Either state that training carries was not restored, or one of the two courses has a fault from there on. If the "
    "abandoned one had the fault, the rollback may hold, and training continues from it; order such a rollback with "
    "before, the time at which the fault began: then only the first loss has to agree"
)


class VerifiedTraining(Protocol):
    @property
    def medic(self) -> Medic: ...

    @property
    def batch_log(self) -> BatchLog: ...

    @property
    def storage(self) -> Any:
        """None without checkpoints."""

    @property
    def accumulation(self) -> int:
        """Batches per optimizer step."""
        ...

    @property
    def carried_hint(self) -> str:
        """Advice for different losses."""
        ...


@dataclass
class _Pending:
    command: JobCommand
    output: Mapping[str, Any]
    comparison: BatchComparison
    losses: LossComparison
    until: float  # ``time.monotonic``, with enough losses
    latest: float  # ``time.monotonic``, without enough losses
    batches: Mapping[str, Any] | None = None  # result, if the comparison of batches ended early
    status: str = ""  # the answer's; empty before it

    @property
    def is_over(self) -> bool:
        """Return whether further steps cannot change the answer."""
        if self.losses.not_finite_at is not None:
            return True
        has_batches = self.batches is not None or self.comparison.is_complete
        return has_batches and (self.losses.is_complete or self.losses is NOTHING)


class RollbackVerification:
    """Comparison after the last rollback of one training. Training thread only, except `finish`."""

    def __init__(self, training: VerifiedTraining, now: Callable[[], float] = time.monotonic) -> None:
        self._training = training
        self._now = now
        self.pending: _Pending | None = None  # the unanswered or still compared rollback
        self.late_because = TOO_SLOW  # reason of the timer's answer
        self._timer = AnswerTimer()
        self._is_logged = training.storage is not None  # without checkpoints there are no rollbacks

    def begin(
        self, command: JobCommand, output: Mapping[str, Any], is_paused: bool, losses: LossComparison = NOTHING
    ) -> None:
        """Answer now if nothing can be compared, otherwise later."""
        self._training.medic.progress.rollback_not_held = False
        comparison = self._training.batch_log.comparison
        remaining = (command.expires_at - envelope.utc_now()).total_seconds() - _RESERVE
        now = self._now()
        until, latest = now + min(_LONGEST, remaining), now + min(_LONGEST_FOR_LOSSES, remaining)
        self.pending = _Pending(command, output, comparison, losses, until, latest)
        if self.pending.is_over:
            self._answer("")
        elif is_paused:
            self._answer(PAUSED)
        else:
            command.later(lambda: self.finish("the job ended"))
            self._timer.start(latest - now, lambda: self.finish(self.late_because))

    def before_draw(self) -> Mapping[str, Any] | None:
        """Return the random state for `batch_drawn`; None if not needed."""
        pending = self.pending
        return randomness.capture() if pending is not None and pending.comparison.is_skip else None

    def batch_drawn(self, batch: Any, epoch: int, before: Mapping[str, Any] | None) -> None:
        """Record the next batch before the loop gets it."""
        if not self._is_logged:
            return
        is_random = before is not None and randomness.has_moved(before)
        self._training.batch_log.add(fingerprint(batch), epoch, is_random)
        self._check_progress()

    def step_done(self, step: int) -> None:
        if self.pending is not None:
            self.pending.losses.step_passed(step)
            self._check_progress()

    def finish(self, because: str, is_error: bool = False) -> None:
        """Answer with what was compared.

        After the loop's own error: ``failed`` unless a few losses were compared.
        """
        with self._timer.lock:
            if self.pending is not None and not self.pending.command.is_answered:
                self._answer(because, is_error)

    def stop_comparing(self, because: str) -> None:
        """Compare no further batches and losses. Losses must still be finite."""
        pending = self.pending
        if pending is not None:
            if pending.batches is None:
                pending.batches = pending.comparison.result(because)
            pending.losses.note_course_change(because, self._training.medic.step or 0)
            self._check_progress()

    def _check_progress(self) -> None:
        """Answer if the comparison is over, or the next batch may be late."""
        if self.pending is None:
            return
        with self._timer.lock:
            pending = self.pending
            if pending is None:  # the timer's answer ended it
                return
            if pending.is_over:
                self._answer("")
            elif not pending.command.is_answered:
                latest = pending.until if pending.losses.has_enough else pending.latest
                if self._now() + self._seconds_per_batch() > latest:
                    self._answer(TOO_SLOW)

    def _answer(self, ended_because: str, is_error: bool = False) -> None:
        """Answer; later comparisons serve a correction."""
        pending = self.pending
        assert pending is not None
        self._timer.cancel()
        command, losses = pending.command, pending.losses
        if pending.is_over:
            self.pending = None
        batches = pending.batches if pending.batches is not None else pending.comparison.result(ended_because)
        verified = {**pending.output["verified"], "batches": batches}
        if losses is not NOTHING:
            verified["losses"] = losses.result(ended_because)
        output = {**pending.output, "verified": verified}
        reason = self._why_failed(pending, output, batches)
        if not reason and is_error and losses is not NOTHING and not losses.has_enough:
            reason = f"{ended_because} before {FEWEST} losses were compared; it is not known whether the rollback holds"
        if reason:
            output["reason"] = reason
            log.error("%s: %s", self._training.medic.job, reason)
        if not command.is_answered:
            pending.status = envelope.FAILED if reason else envelope.APPLIED
            command.answer(pending.status, output)
        elif reason and pending.status == envelope.APPLIED:
            self._training.medic.rollback_did_not_hold(command.id, int(output["step"]), reason)

    def _why_failed(self, pending: _Pending, output: Mapping[str, Any], batches: Mapping[str, Any]) -> str:
        different_batches = batches["compared"] - batches["agreed"]
        if different_batches:
            return _why_batches_differ(output, different_batches, batches["compared"])
        step = output.get("checkpoint_step", output["step"])  # a framework's "step" is the first one after it
        if different := pending.output["verified"].get("carried", {}).get("different"):
            return f"the training went back to step {step}, but carried state differs from what was saved: {different}"
        problem = pending.losses.problem
        if not problem:
            return ""
        if pending.losses.not_finite_at is not None:
            hint = ""
        elif pending.losses.first_differs:
            hint = f". {self._training.carried_hint}"
        else:
            hint = f". {_EITHER_COURSE}"
        return f"the training went back to step {step}, but it does not train as before: {problem}{hint}"

    def _seconds_per_batch(self) -> float:
        median = self._training.medic.progress.pace.median_step_seconds()
        return 0.0 if median is None else median / self._training.accumulation


def _why_batches_differ(output: Mapping[str, Any], different: int, compared: int) -> str:
    skipped = output.get("skipped_batches") or 0
    expected = f"those after the {skipped} that were to be skipped" if skipped else "those from before"
    step = output.get("checkpoint_step", output["step"])
    return (
        f"the training went back to step {step}, and its parameters are those of the checkpoint; but different "
        f"batches follow: {different} of the first {compared} are not {expected}"
    )
