"""The answer to a rollback: it waits until the batches that come again have been compared with those from before.

They come in the flow of training, some steps long; the answer is given when all are there, or when there can be no
more in time. It is ``applied`` only where what was compared agrees. Where other batches come it is ``failed``, and says
what did happen. Who calls it: the loop over the batches, and whatever ends or changes that loop. Not here: the
comparison itself (``recovery.batch_log``).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Protocol

from trainmedic.client import Medic
from trainmedic.job.command import JobCommand
from trainmedic.recovery.batch_log import BatchComparison, BatchLog
from trainmedic.recovery.fingerprints import fingerprint
from trainmedic.torch import randomness
from trainmedic.wire import envelope

log = logging.getLogger("trainmedic")

_LONGEST = 30.0  # seconds that an answer is kept waiting
_RESERVE = 5.0  # seconds before the command expires, in which the answer is on its way
PAUSED = "the training is paused"
TOO_SLOW = "the next batches would have come too late for the answer"


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


@dataclass(frozen=True)
class _Pending:
    """A rollback that was carried out, and whose batches are being compared."""

    command: JobCommand
    output: Mapping[str, Any]
    comparison: BatchComparison
    until: float
    """By ``time.monotonic``, when it is answered at the latest."""


class RollbackVerification:
    """The rollbacks of one training that are not answered yet: one at most. For the training thread.

    ``now`` is a clock that does not jump.
    """

    def __init__(self, training: VerifiedTraining, now: Callable[[], float] = time.monotonic) -> None:
        self._training = training
        self._now = now
        self._pending: _Pending | None = None
        self._is_logged = training.storage is not None  # without checkpoints there are no rollbacks

    def begin(self, command: JobCommand, output: Mapping[str, Any], is_paused: bool) -> None:
        """A rollback was carried out: answer it now where there is nothing to compare, else later."""
        comparison = self._training.batch_log.comparison
        remaining = (command.expires_at - envelope.utc_now()).total_seconds() - _RESERVE
        self._pending = _Pending(command, output, comparison, self._now() + min(_LONGEST, remaining))
        if comparison.is_complete:
            self._answer("")
        elif is_paused:
            self._answer(PAUSED)
        else:
            command.later(lambda: self.finish("the job ended"))

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
        pending = self._pending
        if pending is None:
            return
        if pending.comparison.is_complete:
            self._answer("")
        elif self._now() + self._seconds_per_batch() > pending.until and not pending.command.is_answered:
            self._answer(TOO_SLOW)

    def finish(self, because: str) -> None:
        """Answer with what was compared by now; ``because`` says why no more batches are waited for."""
        if self._pending is not None and not self._pending.command.is_answered:
            self._answer(because)

    def end(self, because: str) -> None:
        """As `finish`; and nothing more is compared, because from here on other batches come than were expected."""
        self.finish(because)
        self._pending = None

    def _answer(self, ended_because: str) -> None:
        """Answer; where batches are still to come, they are compared for the log alone."""
        pending = self._pending
        assert pending is not None
        command, comparison = pending.command, pending.comparison
        if comparison.is_complete:
            self._pending = None
        batches = comparison.told(ended_because)
        verified = {**pending.output["verified"], "batches": batches}
        output = {**pending.output, "verified": verified}
        others = batches["compared"] - batches["agreed"]
        if others:
            output["reason"] = _what_happened(output, others, batches["compared"])
            log.error("%s: %s", self._training.medic.job, output["reason"])
        if not command.is_answered:
            command.answer(envelope.FAILED if others else envelope.APPLIED, output)

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
