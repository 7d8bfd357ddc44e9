"""What Megatron-LM and torchtitan have in common: they write checkpoints by themselves, between two steps.

Such a framework may return from saving before the checkpoint is whole, and has no other way to end between two steps
than an exception. Its data are at a place that counts up, so what rollbacks leave out is kept as ranges of that number.
Who derives from it: ``megatron.training`` and ``torchtitan.training``, with what differs between them.
"""

from __future__ import annotations

import abc
from pathlib import Path
from typing import Any, Callable, ClassVar, Mapping

from trainmedic.client import Medic
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

_NOT_OURS = ("job.accumulate", "job.scale_batch", "job.dataloader_workers")


class SelfSavingFramework(Framework, abc.ABC):
    """One training, from its first step to the last, rollbacks included.

    Each rank keeps what ``carried`` has beside the framework's checkpoints. A crash is left to the launcher, also in a
    job of a single rank.
    """

    restarter: ClassVar[str]
    """The function that attaches Trainmedic, by its full name."""
    fixed_by: ClassVar[str]
    """The framework's settings of batches and workers."""
    layout: ClassVar[StepDirectories]
    no_checkpoint_because: str = ""
    """Why no checkpoint can be written for a ``job.stop``; empty where one can."""

    def __init__(self, medic: Medic, rollbacks: int | None, carried: CarriedFiles) -> None:
        self.medic = medic
        self.writes = medic.rank == 0
        self.carried = carried
        self.left_out: skipped_data.Ranges = []
        self.stops = False
        self._being_saved: tuple[int, CheckpointHealth] | None = None
        self.loop = TrainerLoop(medic, self, RestartLimits(retries=0, delay=0.0, rollbacks=rollbacks))
        self.attachment = Attachment(medic, self.restarter, self._leave_course)
        medic.on("job.stop")(self._stop)
        for action in _NOT_OURS:
            medic.cannot(action, f"the batches and the workers of the loaders are set by {self.fixed_by}")

    # --- what each framework implements -----------------------------------------------------------------

    @abc.abstractmethod
    def checkpoint(self, command: JobCommand | None = None) -> Mapping[str, Any]:
        """Write a checkpoint now, and return the answer, when it is whole. Raises Rejected."""

    @abc.abstractmethod
    def has_saved(self, step: int) -> bool:
        """Whether the checkpoint of that step is whole, as seen from here."""

    # --- when the loop begins ---------------------------------------------------------------------------

    def starts_fresh(self) -> None:
        """The training begins without a checkpoint: nothing in the directory is its own."""
        self.loop.start_fresh()
        if self.writes:
            skipped_data.forget(self.directory)

    def begins(self, optimizers: Any, schedulers: Any, step: int) -> None:
        """The training begins in this process, after so many steps. Every rank calls it once."""
        start = self.path_of(step) if step else None
        self.attachment.training_begins(optimizers, schedulers, self.directory, start, self.writes)
        ranks = self.medic.group("left-out")
        read: list[Any] = ranks.choose(lambda: [list(each) for each in skipped_data.read(self.directory)])
        self.left_out = [(start, stop) for start, stop in read]

    def put_back_carried(self, checkpoint: Path, with_random: bool = True) -> None:
        """Put back what this rank keeps in the checkpoint from which the loop begins."""
        self.loop.proof.carried = self.carried.restore(checkpoint, with_random)

    def leave_out(self, start: int, count: int) -> None:
        """Leave out so many from that number on, also after the job is started again. Raises OSError."""
        if count:
            self.left_out = [*self.left_out, (start, start + count)]
            if self.writes:
                skipped_data.write(self.directory, self.left_out)

    # --- between two steps ------------------------------------------------------------------------------

    @log_errors
    def end_step(self, step: int) -> None:
        """A step is complete: carry out the commands that are due now."""
        self.note_saved()
        self.attachment.carry_out(step)

    def ends_here(self, has_to_move: bool = False) -> bool:
        """Whether the training is to end for good between these two steps.

        Raises LoopEnds where it begins again, or ``has_to_move`` in its data.
        """
        if not self.stops and (self.attachment.restart_is_due or has_to_move):
            raise LoopEnds
        return self.stops

    def begins_saving(self, step: int, health: CheckpointHealth) -> None:
        """The framework writes the checkpoint of that step; `note_saved` tells of it once it is whole."""
        self._being_saved = step, health

    @log_errors
    def note_saved(self) -> None:
        """Tell of a checkpoint once it is whole, which may be some steps after it was begun."""
        if self._being_saved is None or not self.has_saved(self._being_saved[0]):
            return
        step, health = self._being_saved
        self.attachment.saved(step)
        if self.writes and self.path_of(step).is_dir():  # else it went to another place
            self.layout.mark(self.path_of(step), health)
        self._being_saved = None

    def in_window(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The function `call`, whose time belongs to no step: see `Medic.window`."""

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
        self.stops = True
        return output

    def _leave_course(self) -> None:
        self.attachment.live.finish("a rollback was ordered")  # it loads other rates into the same optimizer

    # --- what `Framework` asks --------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def directory(self) -> Path:
        """The directory of the checkpoints."""

    @property
    def directories(self) -> list[Path]:
        return [self.directory]

    def path_of(self, step: int) -> Path:
        """The checkpoint of that step."""
        return self.layout.path_of(self.directory, step)

    def all_checkpoints(self) -> list[SavedCheckpoint]:
        return self.layout.in_directory(self.directory)

    def is_complete(self, checkpoint: Path) -> bool:
        return self.layout.is_complete(checkpoint)

    def step_of(self, checkpoint: Path) -> int:
        return self.layout.step_of(checkpoint) or 0
