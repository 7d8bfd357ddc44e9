"""A character model in pure Python, for machines without PyTorch. Its loop carries out the commands itself.

The model predicts each character from the one before. Checkpoints are in memory.
"""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

import trainmedic
from trainmedic.job.command import JobCommand
from trainmedic.job.parameters import Rollback, ScaleLr
from trainmedic_server.demo.faults import FaultKind
from trainmedic_server.demo.training_text import SPOILED_BATCHES, Explosion, FaultFile, StepPace, training_text

_BATCH = 64  # pairs of characters
_LEARNING_RATE = 4.0
_CHECKPOINT_EVERY, _KEPT = 40, 10  # steps, and checkpoints
_CLIP = 1.0  # largest norm of the gradient
Pairs = Sequence[tuple[int, int]]


class _Checkpoint(Struct, frozen=True):
    at: datetime
    step: int
    batch: int
    weights: list[list[float]]


class _BigramModel:
    """Logits of the next character by the present one."""

    def __init__(self, source: str) -> None:
        vocabulary = sorted(set(source))
        codes = {character: code for code, character in enumerate(vocabulary)}
        self._codes = [codes[character] for character in source]
        self.size = len(vocabulary)
        self.weights = [[0.0] * self.size for _ in range(self.size)]

    def batch(self, number: int, is_spoiled: bool) -> Pairs:
        """Return pairs of characters that follow each other, or of random ones."""
        dice = random.Random(number)  # noqa: S311 - not for security
        starts = [dice.randrange(len(self._codes) - 1) for _ in range(_BATCH)]
        if is_spoiled:
            return [(self._codes[start], dice.randrange(self.size)) for start in starts]
        return [(self._codes[start], self._codes[start + 1]) for start in starts]

    def learn(self, pairs: Pairs, rate: float, gradient_factor: float) -> tuple[float, float]:
        """Return the loss, and the gradient's norm before clipping."""
        loss, gradients = 0.0, dict[int, list[float]]()
        for present, following in pairs:
            row = self.weights[present]
            highest = max(row)
            exponents = [math.exp(logit - highest) for logit in row]
            total = sum(exponents)
            loss -= math.log(exponents[following] / total) / len(pairs)
            gradient = gradients.setdefault(present, [0.0] * self.size)
            for character, exponent in enumerate(exponents):
                gradient[character] += gradient_factor * exponent / total / len(pairs)
            gradient[following] -= gradient_factor / len(pairs)
        norm = math.sqrt(sum(value * value for gradient in gradients.values() for value in gradient))
        scale = rate * min(1.0, _CLIP / norm)
        for present, gradient in gradients.items():
            row = self.weights[present]
            for character, value in enumerate(gradient):
                row[character] -= scale * value
        return loss, norm


class PlainTraining:
    def __init__(self, medic: trainmedic.Medic, faults: FaultFile, explosion: Explosion | None = None) -> None:
        self._medic = medic
        self._faults = faults
        self._explosion = explosion or Explosion()
        self._model = _BigramModel(training_text())
        self._checkpoints: deque[_Checkpoint] = deque(maxlen=_KEPT)
        self._step = self._batch = 0
        self._spoiled = range(0)
        self._rate = _LEARNING_RATE
        medic.on("job.checkpoint")(self._save)
        medic.on("job.rollback")(self._go_back)
        medic.on("job.scale_lr")(self._scale)

    def train(self) -> None:
        pace = StepPace()
        while True:
            self.take_step()
            pace.wait()

    def take_step(self) -> None:
        self._look_for_faults()
        pairs = self._model.batch(self._batch, self._batch in self._spoiled)
        loss, norm = self._model.learn(pairs, self._rate, self._explosion.factor())
        self._step += 1
        self._batch += 1
        self._medic.report(self._step, loss, norm, self._rate, _BATCH)
        if self._step % _CHECKPOINT_EVERY == 0:
            self._save(None)
        self._medic.commands(self._step)

    def _look_for_faults(self) -> None:
        match self._faults.take():
            case FaultKind.DATA:
                self._spoiled = range(self._batch, self._batch + SPOILED_BATCHES)
            case FaultKind.GRADIENTS:
                self._explosion.begin()

    def _save(self, command: JobCommand | None) -> Mapping[str, Any]:  # None: a regular checkpoint
        weights = copy.deepcopy(self._model.weights)
        self._checkpoints.append(_Checkpoint(datetime.now(UTC), self._step, self._batch, weights))
        self._medic.saved(self._step)
        return {"step": self._step}

    def _go_back(self, command: JobCommand) -> Mapping[str, Any]:
        wanted = command.parameters
        assert isinstance(wanted, Rollback)
        if wanted.step is not None or wanted.steps_back is not None:
            raise trainmedic.Rejected("this training only goes back to before a time")
        fitting = [each for each in self._checkpoints if wanted.before is None or each.at < wanted.before]
        if not fitting:
            raise trainmedic.Rejected("there is no checkpoint from before that")
        checkpoint, left = fitting[-1], self._step
        while self._checkpoints[-1] is not checkpoint:
            self._checkpoints.pop()  # it may have the fault, and would be the newest for the next rollback
        self._model.weights = copy.deepcopy(checkpoint.weights)
        self._step, self._batch = checkpoint.step, checkpoint.batch + wanted.skip_batches
        return {"step": checkpoint.step, "left_step": left, "skipped_batches": wanted.skip_batches}

    def _scale(self, command: JobCommand) -> Mapping[str, Any]:
        assert isinstance(command.parameters, ScaleLr)
        before = self._rate
        self._rate *= command.parameters.factor
        return {"before": before, "after": self._rate}
