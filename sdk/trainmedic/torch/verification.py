"""The answer to a rollback: it waits until the batches and losses that come again were compared with those from before.

They come in the flow of training, some steps long; the answer is given when all are there, or when there can be no
more in time. It is ``applied`` only where what was compared agrees. Where other batches or losses come it is
``failed``, and says what did happen. After an early answer the comparison continues: a difference that shows later is
reported by `JobReports.rollback_did_not_hold`. Who calls it: the loop over the batches, the step boundary, and
whatever ends or changes that loop. Not here: the comparisons themselves (``recovery.batch_log``, ``job.loss_log``).
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

_LONGEST = 30.0  # seconds that an answer is kept waiting, once a few losses were compared
_LONGEST_FOR_LOSSES = 90.0  # the same without them
_RESERVE = 5.0  # seconds before the command expires, in which the answer is on its way
PAUSED = "the training is paused"
TOO_SLOW = "the next batches would have come too late for the answer"
_EITHER_COURSE = (
    "Either state that training carries did not go back, or one of the two courses has a fault from there on. If it is "
    "the abandoned one that was at fault, the rollback may hold, and training goes on from it; order such a rollback "
    "with before, the time at which the fault began, and then only the first loss has to agree"
)


class VerifiedTraining(Protocol):
    """What is to be known of a training: a plain loop's ``TrainingState``, a Trainer's ``RollbackProof``."""

    @property
    def medic(self) -> Medic: ...

    @property
    def batch_log(self) -> BatchLog: ...

    @property
    def storage(self) -> Any:
        """Where its checkpoints are; None where it has none."""

    @property
    def accumulation(self) -> int:
        """Batches that make an optimizer step."""
        ...

    @property
    def carried_hint(self) -> str:
        """A sentence that says what to do where other losses come."""
        ...


@dataclass
class _Pending:
    """A rollback that was carried out, and whose batches are being compared."""

    command: JobCommand
    output: Mapping[str, Any]
    comparison: BatchComparison
    losses: LossComparison
    until: float
    """By ``time.monotonic``, when it is answered if enough losses were compared."""
    latest: float
    """The same, when it is answered at the latest."""
    batches: Mapping[str, Any] | None = None
    """What is told of the batches, once no more of them are compared; None before."""
    verdict: str = ""
    """The status that was answered; empty before."""

    @property
    def is_over(self) -> bool:
        """Whether nothing that is still to come could change the verdict."""
        if self.losses.not_finite_at is not None:
            return True
        has_batches = self.batches is not None or self.comparison.is_complete
        return has_batches and (self.losses.is_complete or self.losses is NOTHING)


class RollbackVerification:
    """The rollbacks of one training that are not answered yet: one at most. For the training thread.

    ``now`` is a clock that does not jump.
    """

    def __init__(self, training: VerifiedTraining, now: Callable[[], float] = time.monotonic) -> None:
        self._training = training
        self._now = now
        self._pending: _Pending | None = None
        self._timer = AnswerTimer()
        self._is_logged = training.storage is not None  # without checkpoints there are no rollbacks

    @property
    def waits(self) -> bool:
        """Whether something is still compared."""
        return self._pending is not None

    def begin(
        self, command: JobCommand, output: Mapping[str, Any], is_paused: bool, losses: LossComparison = NOTHING
    ) -> None:
        """A rollback was carried out: answer it now where there is nothing to compare, else later."""
        self._training.medic.progress.rollback_not_held = False
        comparison = self._training.batch_log.comparison
        remaining = (command.expires_at - envelope.utc_now()).total_seconds() - _RESERVE
        now = self._now()
        until, latest = now + min(_LONGEST, remaining), now + min(_LONGEST_FOR_LOSSES, remaining)
        self._pending = _Pending(command, output, comparison, losses, until, latest)
        if self._pending.is_over:
            self._answer("")
        elif is_paused:
            self._answer(PAUSED)
        else:
            command.later(lambda: self.finish("the job ended"))
            self._timer.start(latest - now, lambda: self.finish(TOO_SLOW))

    def before_draw(self) -> Mapping[str, Any] | None:
        """What `batch_drawn` needs to see that a batch is made with random numbers; None where that does not matter."""
        pending = self._pending
        return randomness.capture() if pending is not None and pending.comparison.is_skip else None

    def batch_drawn(self, batch: Any, epoch: int, before: Mapping[str, Any] | None) -> None:
        """Note the batch that comes next, before the loop has it. ``before`` is what `before_draw` returned."""
        if not self._is_logged:
            return
        is_random = before is not None and randomness.has_moved(before)
        self._training.batch_log.add(fingerprint(batch), epoch, is_random)
        self._look()

    def step_done(self, step: int) -> None:
        """Note that a step was trained, whose loss was noted if it was reported."""
        if self._pending is not None:
            self._pending.losses.step_passed(step)
            self._look()

    def finish(self, because: str, is_error: bool = False) -> None:
        """Answer with what was compared by now; ``because`` says why no more is waited for. After an error of the
        loop's own the answer is ``failed`` unless a few losses were compared: it may be that of the restored state."""
        with self._timer.lock:
            self._finish(because, is_error)

    def _finish(self, because: str, is_error: bool) -> None:
        if self._pending is not None and not self._pending.command.is_answered:
            self._answer(because, is_error)

    def end(self, because: str) -> None:
        """Compare nothing more, because from here on other batches come than before, as is right. Losses that are not
        finite are still looked for."""
        pending = self._pending
        if pending is not None:
            if pending.batches is None:
                pending.batches = pending.comparison.told(because)
            pending.losses.course_changes(because, self._training.medic.step or 0)
            self._look()

    def _look(self) -> None:
        """Answer if all was compared, something differs, or time is up."""
        if self._pending is not None:
            with self._timer.lock:
                self._look_at(self._pending)

    def _look_at(self, pending: _Pending) -> None:
        if pending.is_over:
            self._answer("")
        elif not pending.command.is_answered:
            latest = pending.until if pending.losses.has_enough else pending.latest
            if self._now() + self._seconds_per_batch() > latest:
                self._answer(TOO_SLOW)

    def _answer(self, ended_because: str, is_error: bool = False) -> None:
        """Answer; what is still to come after that is compared for a correction alone."""
        pending = self._pending
        assert pending is not None
        self._timer.cancel()
        command, losses = pending.command, pending.losses
        if pending.is_over:
            self._pending = None
        batches = pending.batches if pending.batches is not None else pending.comparison.told(ended_because)
        verified = {**pending.output["verified"], "batches": batches}
        if losses is not NOTHING:
            verified["losses"] = losses.told(ended_because)
        output = {**pending.output, "verified": verified}
        reason = self._reason(pending, output, batches)
        if not reason and is_error and losses is not NOTHING and not losses.has_enough:
            reason = f"{ended_because} before {FEWEST} losses were compared; it is not known whether the rollback holds"
        if reason:
            output["reason"] = reason
            log.error("%s: %s", self._training.medic.job, reason)
        if not command.is_answered:
            pending.verdict = envelope.FAILED if reason else envelope.APPLIED
            command.answer(pending.verdict, output)
        elif reason and pending.verdict == envelope.APPLIED:
            self._training.medic.rollback_did_not_hold(command.id, int(output["step"]), reason)

    def _reason(self, pending: _Pending, output: Mapping[str, Any], batches: Mapping[str, Any]) -> str:
        """Why the rollback does not hold; empty where nothing shows that."""
        others = batches["compared"] - batches["agreed"]
        if others:
            return _what_happened(output, others, batches["compared"])
        step = output.get("checkpoint_step", output["step"])
        if different := pending.output["verified"].get("carried", {}).get("different"):
            return f"the training went back to step {step}, but carried state is not as it was saved: {different}"
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


def _what_happened(output: Mapping[str, Any], others: int, compared: int) -> str:
    skipped = output.get("skipped_batches") or 0
    expected = f"those after the {skipped} that were to be left out" if skipped else "those from before"
    step = output.get("checkpoint_step", output["step"])
    return (
        f"the training went back to step {step}, and its parameters are those of the checkpoint; but other "
        f"batches come: {others} of the first {compared} are not {expected}"
    )
