"""Which faults there are, when they happen, and how they are done to a training loop.

Each happens once, when the loop first comes to its step; going back does not undo that it has happened.
What it leaves behind in the weights, the optimizer or the data is what has to be repaired. Who calls it:
``trainer`` between the parts of its step; ``__main__`` makes the plan.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

POISON = "poisoned batches"
RATE = "learning-rate jump"
EXPLOSION = "gradient explosion"
NAN = "NaN"
HANG = "hang"
KINDS = (POISON, RATE, EXPLOSION, NAN, HANG)

POISONED_BATCHES = 150
NAN_BATCHES = 3
RATE_FACTOR = 30.0
EXPLODING_STEPS = 100
EXPLODING_NORM = 1e4


class Fault(NamedTuple):
    """One to come: its number in the plan, its kind, and the step at which it happens."""

    number: int
    kind: str
    step: int


def plan(count: int, steps: int, seed: int) -> list[Fault]:
    """`count` faults, as many of each kind as can be, in a random order and at uneven distances.

    None comes in the first or the last tenth of the run, so that each meets a model that has learnt something
    and has a checkpoint, and leaves time to see whether it was repaired.
    """
    chance = random.Random(seed)
    kinds = [KINDS[number % len(KINDS)] for number in range(count)]
    chance.shuffle(kinds)
    first, last = steps // 10, steps - steps // 10
    apart = (last - first) / max(count, 1)
    return [
        Fault(number, kind, int(first + apart * (number + chance.uniform(0.0, 0.3))))
        for number, kind in enumerate(kinds)
    ]


@dataclass
class Faults:
    """Those of one run. ``tell`` is called when one happens."""

    coming: Sequence[Fault]
    tell: Callable[[Fault], None]

    def __post_init__(self) -> None:
        self._coming = list(self.coming)
        self._poisoned: list[range] = []
        self._nan: list[range] = []
        self._exploding = 0
        self._noise = torch.Generator().manual_seed(0)

    def begin(self, step: int, batch: int, optimizer: torch.optim.Optimizer) -> None:
        """Before a step: whatever is due happens now, to the batches from this one on."""
        while self._coming and self._coming[0].step <= step:
            fault = self._coming.pop(0)
            self.tell(fault)
            if fault.kind == POISON:
                self._poisoned.append(range(batch, batch + POISONED_BATCHES))
            elif fault.kind == NAN:
                self._nan.append(range(batch, batch + NAN_BATCHES))
            elif fault.kind == EXPLOSION:
                self._exploding = EXPLODING_STEPS
            elif fault.kind == RATE:
                for group in optimizer.param_groups:
                    group["lr"] *= RATE_FACTOR
            elif fault.kind == HANG:
                threading.Event().wait()

    def spoil(self, batch: int, labels: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """The labels of a batch, or noise instead of them. It is the data that is bad, whenever it is met."""
        if any(batch in poisoned for poisoned in self._poisoned):
            return torch.randint(vocabulary, labels.shape, generator=torch.Generator().manual_seed(batch))
        return labels

    def spoil_loss(self, batch: int, loss: torch.Tensor) -> torch.Tensor:
        return loss * float("nan") if any(batch in bad for bad in self._nan) else loss

    def spoil_gradients(self, model: nn.Module) -> None:
        """For some steps the gradients are noise, ten thousand times as large as usual."""
        if not self._exploding:
            return
        self._exploding -= 1
        parameters = [one for one in model.parameters() if one.grad is not None]
        scale = EXPLODING_NORM / sum(one.numel() for one in parameters) ** 0.5
        for one in parameters:
            one.grad = torch.randn(one.shape, generator=self._noise) * scale

    @property
    def remaining(self) -> int:
        return len(self._coming)
