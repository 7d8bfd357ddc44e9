"""Common part of Megatron-LM and torchtitan, which write checkpoints themselves.

Saving may return before the checkpoint is complete.
"""

from __future__ import annotations

import abc
from pathlib import Path
from typing import Any, Callable, ClassVar, Mapping

from trainmedic.client import Medic
from trainmedic.errors import TrainmedicError
from trainmedic.job.command import JobCommand
from trainmedic.job.parameters import Stop
from trainmedic.recovery import skipped_data
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.health import CheckpointHealth
from trainmedic.recovery.loop_restart import LoopEnds
from trainmedic.recovery.restarts import RestartLimits
from trainmedic.trainer.attachment import Attachment, log_errors
from trainmedic.trainer.carried_files import CarriedFiles
from trainmedic.trainer.framework import Framework
from trainmedic.trainer.loop import TrainerLoop
from trainmedic.trainer.step_directories import StepDirectories

_SET_BY_FRAMEWORK = ("job.accumulate", "job.scale_batch", "job.dataloader_workers")


class SelfSavingFramework(Framework, abc.ABC):
    """One training; crashes are left to the launcher.

    Each rank stores ``carried`` next to the framework's checkpoints.
    """

    restarter: ClassVar[str]  # function of this package that makes restarts possible
    fixed_by: ClassVar[str]  # settings that determine batches and workers
    layout: ClassVar[StepDirectories]
    no_checkpoint_because: str = ""

    def __init__(self, medic: Medic, rollbacks: int | None, carried: CarriedFiles) -> None:
        self.medic = medic
        self.writes = medic.rank == 0
        self.carried = carried
        self.left_out: skipped_data.Ranges = []  # iterations of Megatron-LM, or this rank's batches in torchtitan
        self.is_stopping = False
        # Step and health of the checkpoint that may be incomplete.
        self._being_saved: tuple[int, CheckpointHealth] | None = None
        self.loop = TrainerLoop(medic, self, RestartLimits(retries=0, delay=0.0, rollbacks=rollbacks))
        # `must_end` ends the loop.
        self.attachment = Attachment(medic, self.restarter, self._finish_rate_changes)
        medic.on("job.stop")(self._stop)
        for action in _SET_BY_FRAMEWORK:
            medic.cannot(action, f"the batches and the workers of the loaders are set by {self.fixed_by}")

    @abc.abstractmethod
    def checkpoint(self, command: JobCommand | None = None) -> Mapping[str, Any]:
        """Write a checkpoint, and return the answer once it is complete. Raises TrainmedicError."""

    @abc.abstractmethod
    def has_saved(self, step: int) -> bool:
        """Return whether that checkpoint is complete, as seen by this rank."""

    def start_fresh(self) -> None:
        self.loop.start_fresh()
        if self.writes:
            skipped_data.forget(self.directory)

    def begins(self, optimizers: Any, schedulers: Any, step: int) -> None:
        start = self.path_of(step) if step else None
        self.attachment.training_begins(optimizers, schedulers, self.directory, start, self.writes)
        ranks = self.medic.group("left-out")
        read: list[Any] = ranks.choose(lambda: [list(each) for each in skipped_data.read(self.directory)])
        self.left_out = [(start, stop) for start, stop in read]

    def restore_carried(self, checkpoint: Path, with_random: bool = True) -> None:
        self.loop.proof.carried = self.carried.restore(checkpoint, with_random)

    def leave_out(self, start: int, count: int) -> None:
        """Skip ``count`` from ``start`` on. Raises OSError."""
        if count:
            self.left_out = [*self.left_out, (start, start + count)]
            if self.writes:
                skipped_data.write(self.directory, self.left_out)

    @log_errors
    def end_step(self, step: int) -> None:
        self.note_saved()
        self.attachment.carry_out(step)

    def must_end(self, has_to_move: bool = False) -> bool:
        """Return whether to end for good. Raises LoopEnds for a restart or a move in the data."""
        if not self.is_stopping and (self.attachment.restart_is_due or has_to_move):
            raise LoopEnds
        return self.is_stopping

    def save_begins(self, step: int, health: CheckpointHealth) -> None:
        self._being_saved = step, health

    @log_errors
    def note_saved(self) -> None:
        if self._being_saved is None or not self.has_saved(self._being_saved[0]):
            return
        step, health = self._being_saved
        self.attachment.saved(step)
        if self.writes and self.path_of(step).is_dir():  # else it went to another place
            self.layout.mark(self.path_of(step), health)
        self._being_saved = None

    def confirm_saved(self) -> None:
        """Note the checkpoint. Raises TrainmedicError on the writing rank if incomplete."""
        self.note_saved()
        if self.writes and self._being_saved is not None:
            raise TrainmedicError(f"{self.path_of(self._being_saved[0])} is missing or incomplete")

    def in_window(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            with self.medic.window(kind):
                return call(*arguments, **options)

        return called

    def _stop(self, command: JobCommand) -> Mapping[str, Any]:
        assert isinstance(command.parameters, Stop)
        output: Mapping[str, Any] = {"checkpoint": None}
        if command.parameters.checkpoint:
            reason = self.no_checkpoint_because
            output = {**output, "no_checkpoint": reason} if reason else self.checkpoint()
        self.attachment.stop()
        self.is_stopping = True
        return output

    def _finish_rate_changes(self) -> None:
        # A rollback loads other rates into the same optimizer.
        self.attachment.live.finish("a rollback was ordered")

    @property
    @abc.abstractmethod
    def directory(self) -> Path: ...

    @property
    def directories(self) -> list[Path]:
        return [self.directory]

    def path_of(self, step: int) -> Path:
        return self.layout.path_of(self.directory, step)

    def all_checkpoints(self) -> list[SavedCheckpoint]:
        return self.layout.in_directory(self.directory)

    def is_complete(self, checkpoint: Path) -> bool:
        return self.layout.is_complete(checkpoint)

    def step_of(self, checkpoint: Path) -> int:
        return self.layout.step_of(checkpoint) or 0
