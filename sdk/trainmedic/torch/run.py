"""A plain PyTorch training loop that Trainmedic can repair: its batches, its steps, and the boundaries between them.

The loop stays the user's own::

    for batch in run.batches():
        with run.step() as step:
            ...
            step.report(loss=loss, grad_norm=norm)

At the end of each ``with`` lies the step boundary: there, and nowhere else, commands are carried out. A rollback
moves what ``batches`` gives next, so the loop never notices. Not here: what happens at a boundary (``boundary``),
the commands (``handlers``), going back to a checkpoint (``restore``), where batches come from
(``batch_sources``), the making of a run (``attaching``).
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any, Iterator

from trainmedic.client import Medic
from trainmedic.errors import ConfigurationError, Interrupted
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.pausing import LoopPause
from trainmedic.torch import randomness
from trainmedic.torch.batch_sources import BatchSource
from trainmedic.torch.boundary import StepBoundary
from trainmedic.torch.checkpoint_writer import CheckpointWriter
from trainmedic.torch.handlers import CommandHandlers
from trainmedic.torch.restore import CheckpointRestore
from trainmedic.torch.steps import Step
from trainmedic.torch.training_state import TrainingState

log = logging.getLogger("trainmedic")

_EMPTY_EPOCHS = 3  # in a row, after which there is nothing left to train on


class Run:
    """A training run. Made by `trainmedic.torch.attach`; also a context manager that closes it.

    It registers with the medic the commands that can be carried out. ``every`` is after how many steps a checkpoint
    is due, ``at_start`` whether one is due before the first step, and ``accumulates`` whether the loop heeds
    ``Step.is_update``.
    """

    def __init__(self, training: TrainingState, every: int | None, at_start: bool, accumulates: bool) -> None:
        pause = LoopPause(training.medic)
        self.training = training
        self._writer = CheckpointWriter(training)
        self._restore = CheckpointRestore(training)
        self._boundary = StepBoundary(training, self._writer, self._restore, pause, every)
        self._saves_at_start = at_start
        CommandHandlers(training, self._writer, self._restore, pause, accumulates).register()

    # --- the training loop's calls ----------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """How many optimizer steps were done; a rollback sets it back."""
        return self.training.global_step

    @global_step.setter
    def global_step(self, step: int) -> None:
        self.training.global_step = step

    @property
    def epoch(self) -> int:
        """Number of the present epoch, from 0. A rollback may set it back."""
        return self.training.batch_source.epoch if self.training.batch_source is not None else 0

    @property
    def accumulation(self) -> int:
        """How many batches make an optimizer step."""
        return self.training.accumulation

    @accumulation.setter
    def accumulation(self, batches: int) -> None:
        self.training.accumulation = batches

    @property
    def lr_scale(self) -> float:
        """The factor by which commands have scaled the learning rate; for loops that set the rate by hand."""
        return self.training.rate.scale

    @property
    def stopping(self) -> bool:
        """Whether the run is to stop, because a command or the script has said so; that ends ``batches``."""
        return self.training.stopping

    @stopping.setter
    def stopping(self, stops: bool) -> None:
        self.training.stopping = stops

    @property
    def medic(self) -> Medic:
        """The job's connection, which `attach` was given."""
        return self.training.medic

    def state_dict(self) -> dict[str, Any]:
        """The run's own state: its step, place in the data, random generators, what was changed."""
        return self.training.state_dict()

    def batches(self, epochs: int | None = None, steps: int | None = None) -> Iterator[Any]:
        """The batches, epoch after epoch, until ``epochs`` are over, ``steps`` are done or the run is to stop.

        Both count from the beginning of the training, so that a run that was resumed ends where it would have.
        """
        training, boundary = self.training, self._boundary
        source = training.batch_source
        if source is None:
            raise ConfigurationError("batches() needs a loader: attach(..., loader=...)")
        if self._saves_at_start:
            self._save_at_start()
        empty = 0
        while not training.stopping and (steps is None or training.global_step < steps):
            epoch, position = source.epoch, source.position
            if epochs is not None and epoch >= epochs:
                break
            try:
                boundary.begin()
                try:
                    batch = source.next()
                finally:
                    boundary.end()
            except StopIteration:
                empty = empty + 1 if position == 0 and not source.skipped.contains(epoch, 0) else 0
                if empty >= _EMPTY_EPOCHS:
                    break
                continue
            except Interrupted:
                self._loading_was_interrupted(source)
                continue
            empty = 0
            yield batch

    def step(self) -> Step:
        """``with run.step() as step:`` around the work on one batch; commands are carried out at its end."""
        if self._saves_at_start:
            self._save_at_start()
        training = self.training
        return Step(self._boundary, training.global_step + 1, training.batches_done + 1 >= training.accumulation)

    def checkpoint(self) -> SavedCheckpoint | None:
        """Write one now, between two steps; None where the run has no place for it. Raises what the storage raises.

        In a job of several ranks each of them calls it.
        """
        return self._writer.save() if self.training.storage is not None else None

    def resume(self) -> int | None:
        """Go on from the newest complete checkpoint; the step it is of, or None where there is none.

        What commands had changed is changed again. In a job of several ranks each of them calls it. Raises
        TrainmedicError if there are checkpoints and none of them can be loaded, because starting from nothing
        would sooner or later overwrite them.
        """
        return self._restore.resume()

    def close(self) -> None:
        """End loading, and restore the signal's earlier handler. The medic stays connected."""
        self._boundary.close()
        if self.training.batch_source is not None:
            self.training.batch_source.stop_loading()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- what happens beside the steps ------------------------------------------------------------------

    def _save_at_start(self) -> None:
        """Write the initial checkpoint, unless the run was resumed.

        It deletes no old checkpoint, because the user may only have forgotten to resume.
        """
        self._saves_at_start = False
        if self.training.current_checkpoint is None:
            self._writer.save_or_log(prune=False)

    def _loading_was_interrupted(self, source: BatchSource) -> None:
        """Start the loader that hung again at its position, unless a rollback has moved it."""
        training = self.training
        log.warning("%s: the data loader hung and was interrupted", training.medic.job)
        rollbacks, state = training.rollbacks, source.state()
        source.stop_loading()
        self._boundary.cross(interrupted=True)
        if training.rollbacks == rollbacks and not training.stopping:
            # Reading a source up to its position may draw random numbers, which the loop has drawn already.
            with randomness.preserved():
                source.restore(state)
