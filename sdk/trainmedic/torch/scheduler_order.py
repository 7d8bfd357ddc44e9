from __future__ import annotations

import logging

from trainmedic.torch.learning_rate import LearningRate

log = logging.getLogger("trainmedic")

_MOVES = 3  # between steps, until the warning
_OBSERVED = 64  # first steps


class SchedulerOrder:
    # A checkpoint lacks a scheduler's step that follows the training step.

    __slots__ = ("_at_end", "_job", "_moves", "_observed", "_rate", "is_decided")

    def __init__(self, rate: LearningRate, job: str) -> None:
        self._rate = rate
        self._job = job
        self._at_end = rate.schedule_positions()  # at the last step's end
        self._observed = self._moves = 0
        self.is_decided = not self._at_end

    def step_begins(self) -> None:
        if self._observed and self._rate.schedule_positions() != self._at_end:
            self._moves += 1
        self._observed += 1
        if self._moves == _MOVES:
            log.warning(
                "%s: a scheduler steps between two steps, so that checkpoints lack its last step and a resume "
                "continues with the rate of the step before; call scheduler.step() within run.step()",
                self._job,
            )
        self.is_decided = self._moves == _MOVES or self._observed > _OBSERVED

    def step_ended(self) -> None:
        self._at_end = self._rate.schedule_positions()
