"""What the callbacks of all frameworks carry out alike, while the loop runs.

The learning rate, the pause, the cache of a GPU. Not here: checkpoints and the end of training, which each
framework has its own way for. Who calls it: ``trainmedic.huggingface`` and ``trainmedic.lightning``.
"""

from __future__ import annotations

import functools
import gc
import logging
import math
from pathlib import Path
from typing import Any, Callable, Mapping, TypeVar

import torch

from trainmedic import distributed
from trainmedic.client import Medic
from trainmedic.job.command import JobCommand
from trainmedic.job.parameters import ACTIONS, ScaleLr
from trainmedic.job.parameters import Pause as PauseParameters
from trainmedic.recovery.changes import LEARNING_RATE, AppliedChanges
from trainmedic.recovery.pausing import LoopPause
from trainmedic.torch.learning_rate import LearningRate, rate_change

log = logging.getLogger("trainmedic")

Hook = TypeVar("Hook", bound=Callable[..., Any])

NEEDS_RESTART = "it needs a restart of the training loop, and nobody restarts this one"

_AS_LOADED = "as the checkpoint was"
HUNG = "the training loop hung in a step and was interrupted, so that its state is not whole; ask again once it runs"


def harmless(hook: Hook) -> Hook:
    """For what a framework calls: a fault of ours costs a repair, not the training."""

    @functools.wraps(hook)
    def guarded(*arguments: Any, **options: Any) -> Any:
        try:
            return hook(*arguments, **options)
        except Exception:
            log.exception("%s failed; training goes on", hook.__qualname__)
            return None

    return guarded  # type: ignore[return-value]


def join_ranks(medic: Medic) -> None:
    """On every rank when training begins: from now on they carry out the same commands at the same step.

    Where they cannot agree, nobody carries out anything: one rank alone would leave the others waiting for it.
    Raises ConfigurationError.
    """
    if medic.share is not None or not distributed.is_needed():
        return
    try:
        distributed.share(medic)
    finally:
        if medic.share is None:
            for action in ACTIONS:
                medic.cannot(action, "the ranks of this job cannot agree on commands; why is in its log")


class LiveCommands:
    """Registers with `medic`, and carries out what it is told between two steps."""

    def __init__(self, medic: Medic) -> None:
        self.pause = LoopPause(medic)
        self._medic = medic
        self._rate: LearningRate | None = None
        self._changes: AppliedChanges | None = None
        medic.on("job.scale_lr")(self._scale_lr)
        medic.on("job.pause")(self._pause)
        medic.on("job.resume")(lambda command: self.pause.end())
        if torch.cuda.is_available():
            medic.on("job.empty_cache")(_empty_cache)
        else:
            medic.cannot("job.empty_cache", "there is no GPU whose memory is cached")

    def loop_begins(self, optimizer: Any, scheduler: Any) -> None:
        """Of the loop that begins now, maybe after a checkpoint was loaded. What was scaled stays scaled."""
        self._rate = LearningRate(optimizer, scheduler)
        if self._changes is not None:
            self._rate.set_scale(self._changes.scale(LEARNING_RATE))

    def recall(self, is_new: bool, kept_in: Path, goes_on_from: Path | None, writes: bool) -> None:
        """After the first `loop_begins`: what commands had changed before this process, unless training is new.

        It is kept in a file in ``kept_in``, and looked for beside the checkpoint ``goes_on_from`` too; where there
        is none, as that checkpoint holds it. As rank 0 reads it, on all ranks.
        """
        if self._changes is not None:
            return
        assert self._rate is not None
        changes = self._changes = AppliedChanges(kept_in, writes)
        if is_new:
            changes.forget()
            return
        if not changes.recall() and goes_on_from is not None:
            earlier = AppliedChanges(goes_on_from.parent, writes=False)
            if earlier.recall():
                changes.restore(earlier.state())
            elif self._rate.scale != 1.0:
                changes.set_factors(LEARNING_RATE, {_AS_LOADED: self._rate.scale})
        changes.restore(self._medic.group("changes").choose(changes.state))
        self._rate.set_scale(changes.scale(LEARNING_RATE))

    @property
    def expected_learning_rate(self) -> Any:
        """What the schedule says that the rate is now, scaled; None where there is not one that says so."""
        return self._rate.expected if self._rate is not None else None

    def _scale_lr(self, command: JobCommand) -> Mapping[str, Any]:
        assert self._rate is not None
        assert isinstance(command.parameters, ScaleLr)
        if self._changes is None:
            self._changes = AppliedChanges()  # the ranks could not agree on those from before
            self._changes.recall()
        changes = self._changes
        factors = changes.with_factor(LEARNING_RATE, command.id, command.parameters.factor, command.undo_of)
        before = self._rate.values
        self._rate.set_scale(math.prod(factors.values()))
        changes.set_factors(LEARNING_RATE, factors)
        return rate_change(before, self._rate.values, self._rate.scale)

    def _pause(self, command: JobCommand) -> Mapping[str, Any]:
        assert isinstance(command.parameters, PauseParameters)
        return self.pause.start(command.parameters.max)


def _empty_cache(command: JobCommand) -> Mapping[str, Any]:
    before = torch.cuda.memory_reserved()
    gc.collect()
    torch.cuda.empty_cache()
    return {"freed_bytes": before - torch.cuda.memory_reserved()}
