"""The commands that need nothing from the framework, and no restart: learning rate, pause, and the GPU's cache.

Not here: checkpoints and the end of training, for which each framework has its own way. `MedicCallback` makes a
`LiveCommands`, and tells it when a loop begins.
"""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence, TypeVar

import torch

from trainmedic.client import Medic
from trainmedic.job.command import JobCommand
from trainmedic.job.parameters import Pause as PauseParameters
from trainmedic.job.parameters import ScaleLr
from trainmedic.recovery.changes import AS_LOADED, LEARNING_RATE, AppliedChanges
from trainmedic.recovery.pausing import LoopPause
from trainmedic.torch.learning_rate import LearningRate, rate_change

Result = TypeVar("Result")


class LiveCommands:
    """Registers its handlers with `medic`, which calls them between two steps."""

    def __init__(self, medic: Medic) -> None:
        self.pause = LoopPause(medic)
        self._medic = medic
        self._rate: LearningRate | None = None
        self._changes: AppliedChanges | None = None
        self._is_recalled = False
        medic.on("job.scale_lr", in_force=self._scales)(self._scale_lr)
        medic.on("job.pause")(self._pause)
        medic.on("job.resume", in_force=self.pause.is_in_force)(lambda command: self.pause.end())
        if torch.cuda.is_available():
            medic.on("job.empty_cache")(_empty_cache)
        else:
            medic.cannot("job.empty_cache", "there is no GPU whose memory is cached")

    def loop_begins(self, optimizer: Any, scheduler: Any) -> None:
        """Take the optimizer and scheduler of a loop that begins. Commands' scaling is applied to them again."""
        self._rate = LearningRate(optimizer, scheduler)
        if self._changes is not None:
            self._rate.set_scale(self._changes.scale(LEARNING_RATE))

    def recall(self, directory: Path, checkpoint: Path | None, writes: bool) -> None:
        """After the first `loop_begins`: bring back what commands had changed before this process.

        The record of it is a file in ``directory``, or else beside ``checkpoint``, from which training goes on. Where
        both lack it, the rate is scaled as the checkpoint says. Every rank takes what rank 0 reads. Without a
        checkpoint training is new, and the record is deleted.
        """
        if self._changes is not None:
            return
        assert self._rate is not None
        changes = self._changes = AppliedChanges(directory, writes, self._medic.largest_lr_scale)
        if checkpoint is None:
            changes.forget()
            self._is_recalled = True
            return
        if not changes.recall():
            earlier = AppliedChanges(checkpoint.parent, writes=False, largest_lr_scale=self._medic.largest_lr_scale)
            if earlier.recall():
                changes.restore(earlier.state())
            elif self._rate.scale != 1.0:
                changes.set_factors(LEARNING_RATE, {AS_LOADED: self._rate.scale})
        changes.restore(self._medic.group("changes").choose(changes.state))
        self._rate.set_scale(changes.scale(LEARNING_RATE))
        self._is_recalled = True

    def checkpoint_written(self, step: int) -> None:
        """A checkpoint of that step is complete; what was changed has proven itself."""
        if self._changes is not None:
            self._changes.checkpoint_written(step)

    def unscaled(self, call: Callable[[], Result]) -> Result:
        """Call it, such as what saves or loads the optimizer, while the rates are as if nothing had been scaled."""
        result: Result = call() if self._rate is None else self._rate.unscaled(call)
        return result

    @property
    def lr_scale(self) -> float:
        """The factor by which commands have scaled the learning rate."""
        return self._rate.scale if self._rate is not None else 1.0

    @property
    def optimizers(self) -> Sequence[Any]:
        """Those of the loop that runs."""
        return self._rate.optimizers if self._rate is not None else ()

    @property
    def expected_learning_rate(self) -> Any:
        """The rate that the schedule says for now, scaled; None where no schedule says one."""
        return self._rate.expected if self._rate is not None else None

    def _scale_lr(self, command: JobCommand) -> Mapping[str, Any]:
        assert self._rate is not None
        assert isinstance(command.parameters, ScaleLr)
        if self._changes is None:  # the ranks could not agree on those from before
            self._changes = AppliedChanges(largest_lr_scale=self._medic.largest_lr_scale)
            self._changes.recall()
        changes = self._changes
        factors = changes.with_factor(LEARNING_RATE, command.id, command.parameters.factor, command.undo_of)
        before = self._rate.values
        self._rate.set_scale(math.prod(factors.values()))
        changes.set_factors(LEARNING_RATE, factors, self._medic.step)
        return rate_change(before, self._rate.values, self._rate.scale)

    def _scales(self, command_id: str) -> bool | None:
        if self._changes is None or not self._is_recalled:
            return None
        return self._changes.is_in_force(LEARNING_RATE, command_id)

    def _pause(self, command: JobCommand) -> Mapping[str, Any]:
        assert isinstance(command.parameters, PauseParameters)
        return self.pause.start(command.parameters.max, command.id)


def _empty_cache(command: JobCommand) -> Mapping[str, Any]:
    before = torch.cuda.memory_reserved()
    gc.collect()
    torch.cuda.empty_cache()
    return {"freed_bytes": before - torch.cuda.memory_reserved()}
