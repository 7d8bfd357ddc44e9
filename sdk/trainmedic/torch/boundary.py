"""Step boundaries, where commands are carried out and checkpoints written."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any, Callable, Mapping

from trainmedic.errors import Refusal
from trainmedic.job.interrupt import Interrupter
from trainmedic.job.parameters import Rollback
from trainmedic.recovery.pausing import LoopPause
from trainmedic.torch.checkpoints.checkpoint_writer import CheckpointWriter
from trainmedic.torch.meters.layer_norms import LayerNorms
from trainmedic.torch.meters.step_meter import StepMeter
from trainmedic.torch.optimizer_steps import MOST_WITHOUT_UPDATE, OptimizerSteps, has_gradients
from trainmedic.torch.rate_commands import RateCommands
from trainmedic.torch.restore import CheckpointRestore
from trainmedic.torch.scheduler_order import SchedulerOrder
from trainmedic.torch.training_state import TrainingState
from trainmedic.torch.verification import RollbackVerification

log = logging.getLogger("trainmedic")


@dataclass(frozen=True)
class BoundaryWatches:
    verification: RollbackVerification
    rates: RateCommands
    steps: OptimizerSteps

    def step_done(self, step: int) -> None:
        self.verification.step_done(step)
        self.rates.step_done()

    def finish(self, because: str) -> None:
        self.verification.finish(because, is_error=True)
        self.rates.finish(because)


class StepBoundary:
    """Boundaries of one training. ``checkpoint_every``: in steps; None for never."""

    def __init__(
        self,
        training: TrainingState,
        writer: CheckpointWriter,
        restore: CheckpointRestore,
        pause: LoopPause,
        watches: BoundaryWatches,
        checkpoint_every: int | None,
    ) -> None:
        medic = training.medic
        self.training = training
        self._writer = writer
        self._restore = restore
        self._pause = pause
        self._watches = watches
        self._is_save_due = self._has_logged_period = False  # a due save waits for an update
        # A gradient scaler skips updates with overflows, so a boundary without one does not mean accumulation.
        scalers = [part for name, part in training.parts.by_name.items() if name.partition(".")[0] == "scaler"]
        scales_loss = any(getattr(scaler, "is_enabled", lambda: True)() for scaler in scalers)
        self._waits_for_updates = watches.steps.is_hooked and not scales_loss
        self._checkpoint_every = checkpoint_every
        self._medic = medic
        self._progress = medic.progress
        self._progress.skips_overflows = scales_loss
        models = [part for name, part in training.parts.by_name.items() if name.partition(".")[0] == "model"]
        self.scheduler_order = SchedulerOrder(training.rate, medic.job)
        self.meter = StepMeter(models, medic.world_size)
        self.layer_norms = LayerNorms(models, training.rate.optimizers, medic)
        # With several ranks the others wait in a collective, so interrupting one does not help.
        enabled = medic.world_size == 1 and training.is_interruptible
        self._interrupter = Interrupter(self._can_command_end_hang, lambda: medic.stall().is_hang, enabled)
        self.allow_interrupts: Callable[[], None] = self._interrupter.arm
        self.forbid_interrupts: Callable[[], None] = self._interrupter.disarm
        if self._interrupter.works:
            medic.on_arrival = self._interrupter.check_for_hang

    def close(self) -> None:
        self.meter.close()
        self.layer_norms.close()
        self._watches.steps.close()
        if self._medic.on_arrival == self._interrupter.check_for_hang:
            self._medic.on_arrival = None
        self._interrupter.close()

    def report(
        self, number: int, is_update: bool, loss: Any, grad_norm: Any, samples: float | None, more: Mapping[str, Any]
    ) -> None:
        """Report a step at its last batch, with the mean loss of its batches."""
        training = self.training
        if training.accumulation > 1:
            if loss is not None:
                training.losses.append(loss.detach() if hasattr(loss, "detach") else loss)
            if not is_update:
                return
            if training.losses:
                loss, training.losses = sum(training.losses) / len(training.losses), []
        if number <= training.loss_log.until:
            training.loss_log.note(number, loss)
        progress = self._progress
        now = time.perf_counter()
        # Report steps with tensors alone as a whole every `REPORT_INTERVAL`, because it costs time; others at once.
        if (
            now < progress.report_due_at
            and samples is None
            and type(loss) is not float
            and type(grad_norm) is not float
            and not more
        ):
            # The next report counts this step as well.
            progress.add_values(number, loss, grad_norm, now)
            return
        source = training.batch_source
        if samples is None and source is not None and source.samples_per_batch is not None:
            step_samples = source.samples_per_batch * training.accumulation * self._medic.world_size
            samples = step_samples * progress.steps_covered_by(number)
        rate = training.rate
        parts = self.meter.take(progress.steps_covered_by(number))
        epoch = source.epoch if source is not None else None
        more = {
            "learning_rate": rate.present,
            "expected_learning_rate": rate.expected,
            "epoch": epoch,
            **parts,
            **more,
        }
        self._medic.report(number, loss, grad_norm, samples=samples, **more)

    def complete(self, number: int, is_update: bool, is_reported: bool) -> None:
        """Count a batch. After a step's last one, cross the boundary if due."""
        training = self.training
        if not is_update:
            training.batches_done += 1
            return
        training.batches_done = 0
        training.global_step = number
        self.meter.step_ends()
        training.current_checkpoint = None
        if not is_reported:
            self.report(number, True, None, None, None, {})
        if training.gradients:
            training.loss_log.note_gradients(number, training.gradients)
            training.gradients = []
        watches = self._watches
        if watches.verification.pending or watches.rates.pending or training.rate.scale != 1.0:
            watches.step_done(number)
        if self._checkpoint_every is not None and number % self._checkpoint_every == 0:
            self._is_save_due = True
        if self._waits_for_updates and not watches.steps.step_ends():
            return
        if watches.steps.period > 1 and not self._has_logged_period:
            self._has_logged_period = True
            message = "%s: the loop updates its weights every %d steps; commands and checkpoints wait for the updates"
            log.info(message, self._medic.job, watches.steps.period)
        if watches.steps.boundaries_without_update == MOST_WITHOUT_UPDATE and not watches.steps.count:
            self._warn_of_no_update()
        # `is_quiet` comes first: it notes the step.
        if not self._medic.is_quiet(number) or number >= training.memory_due or self._is_save_due:
            self.cross()

    def step_was_interrupted(self) -> None:
        training = self.training
        log.warning("%s: step %d hung and was interrupted", self._medic.job, training.global_step + 1)
        training.current_checkpoint = None
        self.cross(interrupted=True)

    def step_failed(self, error: type[BaseException]) -> None:
        self._watches.finish(f"the loop raised {error.__name__}")

    def cross(self, interrupted: bool = False) -> None:
        """Carry out commands, wait for a pause to end, and save if due. Raises only HalfLoaded."""
        training = self.training
        rollbacks = training.rollbacks
        training.was_interrupted = interrupted
        training.changes.training_begins()
        try:
            for command in self._medic.commands(training.global_step):
                command.unsupported()
            if self._pause.lasts:
                self._pause.wait(training.global_step)
            if training.rollbacks != rollbacks:
                self._is_save_due = False
            # After a rollback the state is a complete checkpoint's.
            if training.rollbacks == rollbacks and training.broken is None:
                if interrupted:
                    self._continue_after_interruption()
                else:
                    if self._is_save_due:
                        self._is_save_due = self._may_be_accumulating()
                        if not self._is_save_due:
                            self._writer.save_when_due()
                    if training.global_step >= training.memory_due:
                        self._writer.save_to_memory()
        except Exception:  # our fault costs a repair, not the training
            log.exception("%s: a step boundary failed; training continues", self._medic.job)
        finally:
            training.was_interrupted = False
            if training.memory is not None:
                training.memory_due = training.memory.next_due(training.global_step)
        if training.broken is not None:
            raise training.broken

    def _may_be_accumulating(self) -> bool:
        """Return whether gradients wait for the first update."""
        steps = self._watches.steps
        if not self._waits_for_updates or steps.count or steps.boundaries_without_update >= MOST_WITHOUT_UPDATE:
            return False
        return has_gradients(self.training.rate.optimizers)

    def _warn_of_no_update(self) -> None:
        log.warning(
            "%s: %d steps ended without a step of the optimizer given to attach(); pass the optimizer that the loop "
            "steps, or use no run for a loop that only evaluates",
            self._medic.job,
            MOST_WITHOUT_UPDATE,
        )

    def _continue_after_interruption(self) -> None:
        self.training.drop_unfinished_step()
        if not self.training.stopping:
            log.error("%s: the interrupted step was not rolled back; training continues without it", self._medic.job)

    def _can_command_end_hang(self) -> bool:
        """Return whether a waiting command needs the hanging loop interrupted. Interrupter's thread only."""
        for command in self._medic.unanswered():
            if command.action == "job.stop":
                return True
            is_new = not command.is_deferred
            if is_new and isinstance(command.parameters, Rollback) and self.training.storage is not None:
                try:
                    self._restore.choose(command.parameters)
                except Refusal:
                    continue
                return True
        return False
