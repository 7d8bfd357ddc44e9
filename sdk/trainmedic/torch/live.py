"""What the callbacks of all frameworks carry out alike, while the loop runs.

The learning rate, the pause, the cache of a GPU. Not here: checkpoints and the end of training, which each
framework has its own way for. Who calls it: ``trainmedic.huggingface`` and ``trainmedic.lightning``.
"""

from __future__ import annotations

import functools
import gc
import logging
from typing import Any, Callable, Mapping, TypeVar

import torch

from trainmedic import distributed
from trainmedic.client import Medic
from trainmedic.commands import JobCommand
from trainmedic.parameters import ACTIONS, ScaleLr
from trainmedic.parameters import Pause as PauseParameters
from trainmedic.pausing import Pause
from trainmedic.torch.learning_rate import LearningRate, output

log = logging.getLogger("trainmedic")

Hook = TypeVar("Hook", bound=Callable[..., Any])

NEEDS_RESTART = "it needs a restart of the training loop, and nobody restarts this one"

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


def join(medic: Medic) -> None:
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


class Live:
    """Registers with `medic`, and carries out what it is told between two steps."""

    def __init__(self, medic: Medic) -> None:
        self.pause = Pause(medic)
        self._rate: LearningRate | None = None
        medic.on("job.scale_lr")(self._scale_lr)
        medic.on("job.pause")(self._pause)
        medic.on("job.resume")(lambda command: self.pause.end())
        if torch.cuda.is_available():
            medic.on("job.empty_cache")(_empty_cache)
        else:
            medic.cannot("job.empty_cache", "there is no GPU whose memory is cached")

    def loop_begins(self, optimizer: Any, scheduler: Any) -> None:
        """Of the loop that begins now, maybe after a checkpoint was loaded. What was scaled stays scaled."""
        before, self._rate = self._rate, LearningRate(optimizer, scheduler)
        if before is not None:
            self._rate.set_scale(before.scale)

    @property
    def expected_learning_rate(self) -> Any:
        """What the schedule says that the rate is now, scaled; None where there is not one that says so."""
        return self._rate.expected if self._rate is not None else None

    def _scale_lr(self, command: JobCommand) -> Mapping[str, Any]:
        assert self._rate is not None
        assert isinstance(command.parameters, ScaleLr)
        before = self._rate.values
        self._rate.multiply(command.parameters.factor)
        return output(before, self._rate.values, self._rate.scale)

    def _pause(self, command: JobCommand) -> Mapping[str, Any]:
        assert isinstance(command.parameters, PauseParameters)
        return self.pause.start(command.parameters.max)


def _empty_cache(command: JobCommand) -> Mapping[str, Any]:
    before = torch.cuda.memory_reserved()
    gc.collect()
    torch.cuda.empty_cache()
    return {"freed_bytes": before - torch.cuda.memory_reserved()}
