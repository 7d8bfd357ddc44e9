"""Writing a checkpoint of the present state: every so many steps, before the first one, or on command.

Not here: how a checkpoint is kept (``checkpoint_storage``), going back to one (``restore``). Who calls it: the run,
its step boundary and its command handlers, on the training thread.
"""

from __future__ import annotations

import logging
import time

from trainmedic.job.progress import CHECKPOINT
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.torch.training_state import TrainingState

log = logging.getLogger("trainmedic")


class CheckpointWriter:
    """Writes the checkpoints of one training."""

    def __init__(self, training: TrainingState) -> None:
        self._training = training

    def save(self, prune: bool = True) -> SavedCheckpoint:
        """Write a checkpoint of the present state, or return the one that was written or loaded at this step.

        With ``prune`` old checkpoints are deleted afterwards. Raises what the storage raises.
        """
        training = self._training
        assert training.storage is not None
        if training.broken is not None:
            raise training.broken
        if training.current_checkpoint is not None:
            return training.current_checkpoint
        medic = training.medic
        with medic.window(CHECKPOINT):
            checkpoint = training.storage.save(training.global_step, training.parts, training.state_dict())
            training.current_checkpoint = checkpoint
            medic.saved(checkpoint.step)
            try:
                if prune:
                    training.changes.drop_earlier_run()
                    training.storage.prune()
            except OSError as error:
                log.warning("%s: old checkpoints could not be deleted: %s", medic.job, error)
        return checkpoint

    def save_or_log(self, prune: bool = True) -> None:
        """The same, but an error is logged, so that training goes on without the checkpoint."""
        training = self._training
        if training.storage is None:
            return
        began = time.monotonic()
        try:
            self.save(prune)
        except Exception:  # whatever the user's storage raises: a full disk costs a checkpoint, not the training
            seconds = time.monotonic() - began
            log.exception(
                "%s: no checkpoint of step %d, after %.1f s", training.medic.job, training.global_step, seconds
            )
