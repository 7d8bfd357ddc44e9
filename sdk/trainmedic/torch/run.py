"""`Run`, a plain PyTorch training loop that Trainmedic can repair."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Any, Iterator

from trainmedic.client import Medic
from trainmedic.errors import ConfigurationError, Interrupted, NotAgreed
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.health import problem
from trainmedic.recovery.pausing import LoopPause
from trainmedic.torch import randomness
from trainmedic.torch.attach_checks import check_even_steps
from trainmedic.torch.boundary import BoundaryWatches, StepBoundary
from trainmedic.torch.checkpoints.checkpoint_tiers import TieredCheckpoints, without_memory
from trainmedic.torch.checkpoints.checkpoint_writer import CheckpointWriter
from trainmedic.torch.gradient_samples import GradientSamples
from trainmedic.torch.handlers import CommandHandlers
from trainmedic.torch.memory.memory_start import MemoryStart
from trainmedic.torch.optimizer_steps import OptimizerSteps
from trainmedic.torch.rate_commands import RateCommands
from trainmedic.torch.restore import CheckpointRestore
from trainmedic.torch.sources.batch_sources import BatchSource
from trainmedic.torch.steps import Step
from trainmedic.torch.training_state import TrainingState
from trainmedic.torch.verification import EPOCHS_ENDED, TOO_SLOW, RollbackVerification

log = logging.getLogger("trainmedic")

_MOST_DRAWN_WITHOUT_STEP = 50  # batches, until a warning
_EMPTY_EPOCHS = 3  # consecutive, until the data counts as empty


class Run:
    """A training run, made by `trainmedic.torch.attach`. As a context manager it closes the run."""

    def __init__(
        self,
        training: TrainingState,
        checkpoint_every: int | None,
        checkpoint_at_start: bool,
        accumulates: bool,
        memory_start: MemoryStart | None = None,
    ) -> None:
        pause = LoopPause(training.medic)
        training.medic.progress.begin_training(time.perf_counter())
        self.training = training
        training.memory = memory_start.memory if memory_start is not None else None
        training.accumulates = accumulates
        self._writer = CheckpointWriter(training)
        self._restore = CheckpointRestore(training)
        self._verification = RollbackVerification(training)
        self._steps = OptimizerSteps(training.rate.optimizers)
        self._steps.sampler = GradientSamples(training).take
        self._rates = RateCommands(training, self._steps, lambda: pause.lasts)
        watches = BoundaryWatches(self._verification, self._rates, self._steps)
        self._boundary = StepBoundary(training, self._writer, self._restore, pause, watches, checkpoint_every)
        self._saves_at_start = checkpoint_at_start and checkpoint_every is not None
        self._memory_start = memory_start
        self._is_begun = False
        self._ends_with_epochs = False  # within `epochs`
        self._is_epoch_over = False  # whether an epoch has ended since `epochs` yielded
        self._is_left = False  # whether the loop has left `batches` before its end
        self._was_for_one = False  # whether the last `batches` was for one epoch, which ended
        CommandHandlers(
            training, self._writer, self._restore, pause, self._verification, self._rates, accumulates
        ).register()
        # Batches; None after the first step, or after the warning.
        self._drawn_without_step: int | None = 0

    @property
    def global_step(self) -> int:
        """Completed optimizer steps; a rollback decreases it."""
        return self.training.global_step

    @global_step.setter
    def global_step(self, step: int) -> None:
        self.training.global_step = step

    @property
    def epoch(self) -> int:
        """Present epoch, from 0; a rollback may decrease it."""
        return self.training.batch_source.epoch if self.training.batch_source is not None else 0

    @property
    def _source(self) -> BatchSource:
        if self.training.batch_source is None:
            raise ConfigurationError("batches() needs a loader: attach(..., loader=...)")
        return self.training.batch_source

    @property
    def accumulation(self) -> int:
        return self.training.accumulation

    @accumulation.setter
    def accumulation(self, batches: int) -> None:
        self.training.set_accumulation(batches)

    @property
    def lr_scale(self) -> float:
        """Factor by commands, for loops that set the rate themselves."""
        return self.training.rate.asked_scale()

    def learning_rate(self, value: Any) -> Any:
        """Return the rate times the factor by commands. Loops that write ``group["lr"]`` call it each time."""
        return self.training.rate.scaled(value)

    @property
    def stopping(self) -> bool:
        """True if a command or the script has stopped the run; ends ``batches``."""
        return self.training.stopping

    @stopping.setter
    def stopping(self, stops: bool) -> None:
        self.training.stopping = stops

    @property
    def medic(self) -> Medic:
        return self.training.medic

    def state_dict(self) -> dict[str, Any]:
        """Return step, data position, random generators and changes."""
        return self.training.state_dict()

    def epochs(self, count: int) -> Iterator[int]:
        """Yield epochs up to ``count`` and end `batches` with each, so that code between them runs again too after a
        rollback. Leaving `batches` earlier ends `epochs`."""
        self._ends_with_epochs = True
        try:
            while self._source.epoch < count and not self.stopping:
                self._is_epoch_over = self._is_left = False
                yield self._source.epoch
                if not self._is_epoch_over:
                    break
            if self._is_left:
                message = "%s: run.epochs() ends, because the loop has left batches() before the end of epoch %d"
                log.warning(message, self.training.medic.job, self._source.epoch)
        finally:
            self._ends_with_epochs = False

    def batches(self, epochs: int | None = None, steps: int | None = None) -> Iterator[Any]:
        """Yield batches until ``epochs`` or ``steps`` since the training's start, or until stopped."""
        training, source = self.training, self._source
        is_for_one = epochs == source.epoch + 1 and not self._ends_with_epochs
        # A loop that counts epochs itself: a rollback tells it what will not run again.
        training.lone_epoch = source.epoch if is_for_one and self._was_for_one else None
        self._was_for_one, self._is_left = False, True
        if not self._is_begun:
            self._begin()
        may_continue = False
        self._verification.late_because = self._rates.late_because = TOO_SLOW
        try:
            yield from self._draw(source, epochs, steps)
            # Do not answer commands yet: a loop by epochs calls this again. Else the run's end or a time limit answers.
            is_at_end = self._is_epoch_over if self._ends_with_epochs else epochs is not None and source.epoch >= epochs
            may_continue = is_at_end and not training.stopping
            self._was_for_one, self._is_left = is_for_one and is_at_end, False
        finally:
            if may_continue:
                self._verification.late_because = self._rates.late_because = EPOCHS_ENDED
            else:
                self._verification.finish("the loop ended")
                self._rates.finish("the loop ended")

    def _draw(self, source: BatchSource, epochs: int | None, steps: int | None) -> Iterator[Any]:
        training, boundary, verification = self.training, self._boundary, self._verification
        empty_epochs = 0
        while not training.stopping and (steps is None or training.global_step < steps):
            epoch, position = source.epoch, source.position
            if epochs is not None and epoch >= epochs:
                break
            before = verification.before_draw()
            try:
                boundary.allow_interrupts()
                began = time.perf_counter()
                try:
                    batch = source.next()
                finally:
                    boundary.forbid_interrupts()
                boundary.meter.add_batch(batch, time.perf_counter() - began)
            except StopIteration:
                is_empty = position == 0 and not source.skipped.contains(epoch, 0)
                empty_epochs = empty_epochs + 1 if is_empty else 0
                self._is_epoch_over = not is_empty
                if self._ends_with_epochs:
                    break
                if empty_epochs >= _EMPTY_EPOCHS:
                    break
                continue
            except Interrupted:
                self._restart_interrupted_loading(source)
                continue
            empty_epochs = 0
            if self._drawn_without_step is not None:
                self._count_drawn(self._drawn_without_step + 1)
            if not training.fetch_order.is_decided:
                training.fetch_order.batch_was_taken()
            verification.batch_drawn(batch, epoch, before)
            yield batch

    def step(self) -> Step:
        """Return the context manager for one batch; it carries out commands at its end."""
        if not self._is_begun:
            self._begin()
        training = self.training
        self._drawn_without_step = None
        return Step(self._boundary, training.global_step + 1, training.batches_done + 1 >= training.accumulation)

    def checkpoint(self) -> SavedCheckpoint | None:
        """Write a checkpoint between two steps; None without storage. Every rank calls it.

        Raises the storage's errors.
        """
        return self._writer.save() if self.training.storage is not None else None

    def resume(self) -> int | None:
        """Continue from the newest complete checkpoint, if possible a healthy one, with changes by commands. Every rank
        calls it.

        Returns its step, or None without one. Raises TrainmedicError if no existing one can be loaded.
        """
        self._begin_memory(resumes=True)
        step = self._restore.resume()
        if self.training.memory is not None:
            self.training.memory.drop_after(self.training.global_step)
        return step

    def close(self) -> None:
        """End loading and background writes. Free in-memory checkpoints, unless an exception ends the training."""
        self._verification.finish("the run was closed")
        self._rates.finish("the run was closed")
        self._boundary.close()
        storage = self.training.storage
        if isinstance(storage, TieredCheckpoints) and storage.background is not None:
            storage.background.close()
        if self._memory_start is not None:
            self._memory_start.end(in_order=sys.exc_info()[0] in (None, GeneratorExit) and self.training.broken is None)
        if self.training.batch_source is not None:
            self.training.batch_source.stop_loading()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self) -> None:
        self._is_begun = True
        if self.training.storage is not None and self.training.medic.world_size > 1:
            check_even_steps(self.training.parts)
        self._restore.warn_of_foreign_checkpoints()
        self._begin_memory(resumes=False)
        self._save_at_start()

    def _count_drawn(self, batches: int) -> None:
        if batches <= _MOST_DRAWN_WITHOUT_STEP:
            self._drawn_without_step = batches
            return
        self._drawn_without_step = None
        log.warning(
            "%s: the loop has drawn %d batches and begun no step, so no command is carried out and no checkpoint "
            "is written; put the work on each batch into: with run.step() as step",
            self.training.medic.job,
            _MOST_DRAWN_WITHOUT_STEP,
        )

    def _save_at_start(self) -> None:
        # Delete none: the user may have forgotten to resume.
        if self._saves_at_start and self.training.current_checkpoint is None:
            self._writer.save_or_log(prune=False)
        self._saves_at_start = False

    def _begin_memory(self, resumes: bool) -> None:
        """Start in-memory checkpoints once; training continues without them."""
        training, start = self.training, self._memory_start
        memory, storage = training.memory, without_memory(training.storage)
        if start is None or memory is None or storage is None or memory.pool is not None:
            return

        def newest_step() -> int:
            return max(
                (each.step for each in storage.checkpoints() if each.complete and not problem(each.health)), default=-1
            )

        try:
            start.begin(training.medic.group("memory"), newest_step if resumes else None)
            training.memory_due = memory.next_due(training.global_step)
        except (NotAgreed, OSError) as error:
            log.warning("%s: no in-memory checkpoints: %s", training.medic.job, error)

    def _restart_interrupted_loading(self, source: BatchSource) -> None:
        """Carry out commands; restart the loader unless a rollback moved it."""
        training = self.training
        log.warning("%s: the data loader hung and was interrupted", training.medic.job)
        rollbacks, state = training.rollbacks, source.state()
        source.stop_loading()
        self._boundary.cross(interrupted=True)
        if training.rollbacks == rollbacks and not training.stopping:
            # Restoring may draw random numbers that the loop has already drawn.
            with randomness.preserved():
                source.restore(state)
