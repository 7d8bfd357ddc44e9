"""Handlers of commands for a plain PyTorch training, called at step boundaries. Rollbacks go on in ``restore``.

`Rejected` and `Unsupported` are refusals without any change.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, Mapping

import torch

from trainmedic.errors import Rejected, described
from trainmedic.job.command import JobCommand
from trainmedic.job.handlers import InForce, as_it_was
from trainmedic.job.parameters import Accumulate, DataloaderWorkers, Pause, Rollback, ScaleBatch, Stop
from trainmedic.recovery.changes import ACCUMULATION, BATCH_SIZE, LEARNING_RATE, agreed_workers, scaled_whole
from trainmedic.recovery.pausing import LoopPause
from trainmedic.torch.checkpoints.checkpoint_writer import CheckpointWriter
from trainmedic.torch.rank_agreement import on_all_ranks
from trainmedic.torch.rate_commands import RateCommands
from trainmedic.torch.restore import OTHER_BATCHES, CheckpointRestore
from trainmedic.torch.training_state import TrainingState
from trainmedic.torch.verification import PAUSED, RollbackVerification

log = logging.getLogger("trainmedic")

Output = Mapping[str, Any]

NO_CHECKPOINTS = "the run has no checkpoint storage: use attach(..., checkpoints=...)"
NO_ACCUMULATION = "the loop does not declare gradient accumulation: use attach(..., accumulation=...)"
NO_BATCH_SIZE = "only the batch size of a plain DataLoader over an indexed data set can be changed"
NO_WORKERS = "only the workers of a plain DataLoader over an indexed data set can be changed"
NO_ACCELERATOR = "there is no accelerator whose memory is cached"
INCOMPLETE_STATE = "the step hung and was interrupted; its state is incomplete"


@dataclass(frozen=True)
class CommandHandlers:
    """Handlers by action. ``_accumulates``: the loop heeds ``Step.is_update``."""

    _training: TrainingState
    _writer: CheckpointWriter
    _restore: CheckpointRestore
    _pause: LoopPause
    _verification: RollbackVerification
    _rates: RateCommands
    _accumulates: bool

    def register(self) -> None:
        medic, source = self._training.medic, self._training.batch_source
        no_checkpoints = NO_CHECKPOINTS if self._training.storage is None else ""
        missing = {
            "job.checkpoint": no_checkpoints,
            "job.rollback": no_checkpoints,
            "job.accumulate": "" if self._accumulates else NO_ACCUMULATION,
            "job.scale_batch": "" if source is not None and source.batch_size is not None else NO_BATCH_SIZE,
            "job.dataloader_workers": "" if source is not None and source.workers is not None else NO_WORKERS,
            "job.empty_cache": "" if _accelerator() is not None else NO_ACCELERATOR,
        }
        handlers = {
            "job.checkpoint": self.checkpoint,
            "job.rollback": self.rollback,
            "job.scale_lr": self._rates.scale,
            "job.scale_batch": self.scale_batch,
            "job.accumulate": self.accumulate,
            "job.dataloader_workers": self.dataloader_workers,
            "job.empty_cache": self.empty_cache,
            "job.pause": self.pause,
            "job.resume": self.resume,
            "job.stop": self.stop,
        }
        in_force: dict[str, InForce] = {
            "job.scale_lr": partial(self._training.changes.is_in_force, LEARNING_RATE),
            "job.scale_batch": partial(self._training.changes.is_in_force, BATCH_SIZE),
            "job.accumulate": partial(self._training.changes.is_in_force, ACCUMULATION),
            "job.dataloader_workers": as_it_was,
            "job.resume": self._pause.is_in_force,
        }
        for action, handler in handlers.items():
            if missing.get(action):
                medic.cannot(action, missing[action])
            else:
                medic.on(action, in_force=in_force.get(action))(handler)

    def checkpoint(self, command: JobCommand) -> Output:
        if self._training.was_interrupted:
            raise Rejected(INCOMPLETE_STATE)
        checkpoint = self._writer.save()
        return {"checkpoint": checkpoint.name, "saved_at": checkpoint.at.isoformat()}

    def rollback(self, command: JobCommand) -> None:
        rollback = command.parameters
        assert isinstance(rollback, Rollback)
        source = self._training.batch_source
        if source is not None and rollback.skip_batches:
            source.check_skip(rollback.skip_batches)
        output = self._restore.roll_back(rollback, command.group)
        self._verification.finish("another rollback was ordered")
        self._rates.restart_watch()
        losses = self._training.loss_log.comparison
        self._verification.begin(command, output, self._pause.lasts, losses)

    def scale_batch(self, command: JobCommand) -> Output:
        training, source, changes = self._training, self._training.batch_source, self._training.changes
        parameters = command.parameters
        assert isinstance(parameters, ScaleBatch)
        assert source is not None
        assert source.batch_size is not None
        assert training.script_batch_size is not None
        sizes = changes.with_factor(BATCH_SIZE, command.id, parameters.factor, command.undo_of)
        accumulations = changes.factors(ACCUMULATION)
        if command.id not in sizes:  # undo of an earlier change and of its effect on the accumulation
            accumulations.pop(command.undo_of or "", None)
        elif parameters.keep_global_batch:
            if not self._accumulates:
                raise Rejected(f"the global batch cannot be kept: {NO_ACCUMULATION}")
            accumulations[command.id] = 1 / parameters.factor
        round_down = not parameters.keep_global_batch
        size = scaled_whole(training.script_batch_size, sizes, "the micro-batch", round_down=round_down)
        accumulation = self._scaled_accumulation(accumulations)
        before, accumulation_before = source.batch_size, training.accumulation
        try:
            on_all_ranks(command.group, lambda: source.set_batch_size(size))
        except Exception:  # different batch sizes would end epochs at different steps
            source.set_batch_size(before)
            raise
        self._record_batch_change()
        training.set_accumulation(accumulation)
        changes.set_factors(BATCH_SIZE, sizes, training.global_step)
        changes.set_factors(ACCUMULATION, accumulations, training.global_step)
        return {
            "before": before,
            "after": size,
            "accumulation_before": accumulation_before,
            "accumulation_after": accumulation,
            "global_batch_before": before * accumulation_before * training.medic.world_size,
            "global_batch_after": size * accumulation * training.medic.world_size,
        }

    def accumulate(self, command: JobCommand) -> Output:
        training, changes = self._training, self._training.changes
        assert isinstance(command.parameters, Accumulate)
        factors = changes.with_factor(ACCUMULATION, command.id, command.parameters.factor, command.undo_of)
        before = training.accumulation
        training.set_accumulation(self._scaled_accumulation(factors))
        training.loss_log.note_course_change(training.global_step)
        changes.set_factors(ACCUMULATION, factors, training.global_step)
        return {"before": before, "after": training.accumulation}

    def dataloader_workers(self, command: JobCommand) -> Output:
        training, source = self._training, self._training.batch_source
        assert isinstance(command.parameters, DataloaderWorkers)
        assert source is not None
        assert source.workers is not None
        previous = source.workers
        count, is_upper_limit = agreed_workers(command, previous), command.parameters.at_most is not None
        if command.undo_of is not None and training.changes.workers is None:
            # No active change: `restore` ended the limit, because the restarted script's workers do not exceed it.
            count = previous
        try:
            source.set_workers(count)
        except Exception:  # return to the workers that are known to start
            source.set_workers(previous)
            raise
        if bool(previous) != bool(count):  # workers draw their own random numbers
            self._record_batch_change()
        is_over = command.undo_of is not None and count == training.script_workers
        changed = None if is_over else count
        training.changes.set_workers(changed, training.global_step, at_most=is_upper_limit)
        return {"previous": previous, "count": count}

    def empty_cache(self, command: JobCommand) -> Output:
        accelerator = _accelerator()
        assert accelerator is not None
        gc.collect()
        before = int(accelerator.memory_reserved())
        accelerator.empty_cache()
        after = int(accelerator.memory_reserved())
        return {"reserved_before": before, "reserved_after": after, "freed": before - after}

    def pause(self, command: JobCommand) -> Output:
        assert isinstance(command.parameters, Pause)
        output = self._pause.start(command.parameters.max, command.id, command.parameters.extends)
        self._verification.finish(PAUSED)
        self._rates.finish(PAUSED)
        return output

    def resume(self, command: JobCommand) -> Output:
        return self._pause.end()

    def stop(self, command: JobCommand) -> Output:
        training = self._training
        assert isinstance(command.parameters, Stop)
        output: dict[str, Any] = {"stopping": True}
        training.stopping = True
        self._verification.finish("the training was told to stop")
        self._rates.finish("the training was told to stop")
        self._pause.end()
        if command.parameters.checkpoint and training.storage is None:
            output["no_checkpoint"] = NO_CHECKPOINTS
        elif command.parameters.checkpoint and training.was_interrupted:
            output["no_checkpoint"] = INCOMPLETE_STATE
        elif command.parameters.checkpoint:
            try:
                output["checkpoint"] = self._writer.save().name
            except Exception as error:  # any error of the user's storage: stop nevertheless
                log.exception("%s: no checkpoint before the stop", training.medic.job)
                output["no_checkpoint"] = described(error)
        return output

    def _record_batch_change(self) -> None:
        self._verification.stop_comparing("a command has changed the batches")
        self._training.batch_log.forget(OTHER_BATCHES)
        self._training.loss_log.note_course_change(self._training.global_step)

    def _scaled_accumulation(self, factors: Mapping[str, float]) -> int:
        return scaled_whole(self._training.script_accumulation, factors, "the number of accumulation steps")


def _accelerator() -> Any:
    if torch.cuda.is_available():
        return torch.cuda
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return torch.xpu
    return None
