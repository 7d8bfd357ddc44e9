"""What loops and callbacks share whose framework writes checkpoints by itself, between two steps.

Such a framework may return from saving before the checkpoint is whole, and has no other way to end between two steps
than an exception. Who derives from them: ``megatron`` and ``torchtitan``.
"""

from __future__ import annotations

import abc
from pathlib import Path
from typing import Any, Mapping, TypeVar

from trainmedic.client import Medic
from trainmedic.job.command import JobCommand
from trainmedic.job.parameters import Stop
from trainmedic.recovery import left_out
from trainmedic.recovery.health import CheckpointHealth
from trainmedic.recovery.restarts import RestartLimits
from trainmedic.trainer.callback import MedicCallback, log_errors
from trainmedic.trainer.carried_files import CarriedFiles
from trainmedic.trainer.loop import TrainerLoop

_NOT_OURS = ("job.accumulate", "job.scale_batch", "job.dataloader_workers")


class SelfSavingLoop(TrainerLoop):
    """A `TrainerLoop` over checkpoints that its framework writes; `carried` is what each rank keeps beside that."""

    def __init__(self, medic: Medic, limits: RestartLimits, carried: CarriedFiles) -> None:
        super().__init__(medic, limits, writes=medic.rank == 0)
        self.carried = carried

    def _put_back_carried(self, checkpoint: Path, with_random: bool = True) -> None:
        """Put back what this rank keeps in the checkpoint from which the loop begins."""
        self.proof.carried = self.carried.restore(checkpoint, with_random)

    @abc.abstractmethod
    def has_saved(self, step: int) -> bool:
        """Whether the checkpoint of that step is whole, as seen from here."""

    @abc.abstractmethod
    def mark(self, step: int, health: CheckpointHealth) -> None:
        """Note on the checkpoint of that step, which is whole, what it is to be judged by."""

    def _recalled_left_out(self) -> left_out.Ranges:
        """What rollbacks have left out before this process, the same on all ranks."""
        ranks = self._medic.group("left-out")
        read: list[Any] = ranks.choose(lambda: [list(each) for each in left_out.read(self.directories[0])])
        return [(start, stop) for start, stop in read]


SavingLoop = TypeVar("SavingLoop", bound=SelfSavingLoop)


class SelfSavingCallback(MedicCallback[SavingLoop], abc.ABC):
    """A `MedicCallback` that stops and goes back between two steps; ``fixed`` says what sets the batches and workers.

    ``_begun`` and ``_health`` are set when a checkpoint is begun, `_note_saved` tells of it once it is whole.
    """

    def __init__(self, medic: Medic, restarter: str, fixed: str) -> None:
        super().__init__(medic, restarter, {"job.rollback": self._roll_back})
        self._begun: int | None = None  # the step of a checkpoint that is being written
        self._health = CheckpointHealth()  # when it was begun
        self._stops = False
        medic.on("job.stop")(self._stop)
        for action in _NOT_OURS:
            medic.cannot(action, f"the batches and the workers of the loaders are set by {fixed}")

    @abc.abstractmethod
    def _checkpoint(self, command: JobCommand | None = None) -> Mapping[str, Any]:
        """Write a checkpoint now, and return the answer, when it is whole."""

    @property
    def _no_checkpoint_because(self) -> str:
        """Why no checkpoint can be written; empty where one can."""
        return ""

    @log_errors
    def _note_saved(self) -> None:
        """Tell of a checkpoint once it is whole, which may be some steps after it was begun."""
        if self._begun is not None and self._required_loop.has_saved(self._begun):
            self.medic.saved(self._begun)
            self._live.checkpoint_written(self._begun)
            self._required_loop.mark(self._begun, self._health)
            self._begun = None

    def _stop(self, command: JobCommand) -> Mapping[str, Any]:
        assert isinstance(command.parameters, Stop)
        output: Mapping[str, Any] = {"checkpoint": None}
        if command.parameters.checkpoint:
            reason = self._no_checkpoint_because
            output = {**output, "no_checkpoint": reason} if reason else self._checkpoint()
        self._live.pause.end()
        self._required_loop.restarts.stop()
        self._stops = True
        return output

    def _roll_back(self, command: JobCommand) -> None:
        if self._required_loop.roll_back(command):
            self._live.finish("a rollback was ordered")  # it loads other rates into the same optimizer
            self._live.pause.end()
