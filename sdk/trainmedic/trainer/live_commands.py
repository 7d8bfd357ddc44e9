"""Commands without a restart: learning rate, pause, and GPU cache."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence, TypeVar

import torch

from trainmedic.client import Medic
from trainmedic.job.command import JobCommand
from trainmedic.job.loss_log import LossLog
from trainmedic.job.parameters import Pause as PauseParameters
from trainmedic.recovery.changes import AS_LOADED, LEARNING_RATE, AppliedChanges
from trainmedic.recovery.pausing import LoopPause
from trainmedic.torch.learning_rate import LearningRate
from trainmedic.torch.optimizer_steps import OptimizerSteps
from trainmedic.torch.rate_commands import RateCommands
from trainmedic.torch.verification import PAUSED

Result = TypeVar("Result")

_HOW = "use the rate that the callback's learning_rate(value) returns, or give the Trainer the scheduler"


class LiveCommands:
    def __init__(self, medic: Medic) -> None:
        self.pause = LoopPause(medic)
        self.medic = medic
        self.loss_log = LossLog()
        self._rate: LearningRate | None = None
        self._changes: AppliedChanges | None = None
        self._is_recalled = False  # `recall` has succeeded; until then active changes are unknown
        self._steps = OptimizerSteps(())
        self._rates = RateCommands(self, self._steps, lambda: self.pause.lasts, how=_HOW)
        medic.on("job.scale_lr", in_force=self._is_scale_in_force)(self._rates.scale)
        medic.on("job.pause")(self._pause)
        medic.on("job.resume", in_force=self.pause.is_in_force)(lambda command: self.pause.end())
        if torch.cuda.is_available():
            medic.on("job.empty_cache")(_empty_cache)
        else:
            medic.cannot("job.empty_cache", "there is no GPU whose memory is cached")

    def loop_begins(self, optimizer: Any, scheduler: Any) -> None:
        self._rate = LearningRate(optimizer, scheduler)
        if self._changes is not None:
            self._rate.set_scale(self._changes.scale(LEARNING_RATE))
        self._steps.close()
        self._steps = OptimizerSteps(self._rate.optimizers)
        self._rates.restart_watch(self._steps)

    def loop_ends(self, is_final: bool) -> None:
        self._steps.close()
        if is_final:
            self._rates.finish("training ended")

    def finish(self, because: str) -> None:
        self._rates.finish(because)

    def step_done(self) -> None:
        self._rates.step_done()

    def learning_rate(self, value: Any) -> Any:
        return value if self._rate is None else self._rate.scaled(value)

    def recall(self, directory: Path, checkpoint: Path | None, writes: bool) -> None:
        """Restore an earlier process's changes, after the first `loop_begins`.

        They are in ``directory``, else next to ``checkpoint``, else in its rate; every rank takes rank 0's. Without a
        checkpoint they are forgotten.
        """
        if self._changes is not None:
            return
        assert self._rate is not None
        changes = self._changes = AppliedChanges(directory, writes, self.medic.largest_lr_scale)
        if checkpoint is None:
            changes.forget()
            self._is_recalled = True
            return
        if not changes.recall():
            earlier = AppliedChanges(checkpoint.parent, writes=False, largest_lr_scale=self.medic.largest_lr_scale)
            if earlier.recall():
                changes.restore(earlier.state())
            elif self._rate.scale != 1.0:
                changes.set_factors(LEARNING_RATE, {AS_LOADED: self._rate.scale})
        changes.restore(self.medic.group("changes").choose(changes.state))
        self._rate.set_scale(changes.scale(LEARNING_RATE))
        self._is_recalled = True

    def checkpoint_written(self, step: int) -> None:
        if self._changes is not None:
            self._changes.checkpoint_written(step)

    def call_unscaled(self, call: Callable[[], Result]) -> Result:
        result: Result = call() if self._rate is None else self._rate.unscaled(call)
        return result

    @property
    def lr_scale(self) -> float:
        return self._rate.scale if self._rate is not None else 1.0

    @property
    def optimizers(self) -> Sequence[Any]:
        return self._rate.optimizers if self._rate is not None else ()

    @property
    def expected_learning_rate(self) -> Any:
        return self._rate.expected if self._rate is not None else None

    @property
    def rate(self) -> LearningRate:
        assert self._rate is not None
        return self._rate

    @property
    def changes(self) -> AppliedChanges:
        if self._changes is None:  # the ranks could not agree on earlier ones
            self._changes = AppliedChanges(largest_lr_scale=self.medic.largest_lr_scale)
            self._changes.recall()
        return self._changes

    @property
    def global_step(self) -> int:
        return self.medic.step or 0

    def _is_scale_in_force(self, command_id: str) -> bool | None:
        if self._changes is None or not self._is_recalled:
            return None
        return self._changes.is_in_force(LEARNING_RATE, command_id)

    def _pause(self, command: JobCommand) -> Mapping[str, Any]:
        assert isinstance(command.parameters, PauseParameters)
        output = self.pause.start(command.parameters.max, command.id, command.parameters.extends)
        self._rates.finish(PAUSED)
        return output


def _empty_cache(command: JobCommand) -> Mapping[str, Any]:
    before = torch.cuda.memory_reserved()
    gc.collect()
    torch.cuda.empty_cache()
    return {"freed_bytes": before - torch.cuda.memory_reserved()}
