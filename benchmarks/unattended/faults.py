"""Faults, their times, and their effects on a training loop of several ranks.

Each happens once, when the loop first reaches its step; a record ensures that, after going back and in new processes
too. Its effect in the weights, the optimizer, the data, the processes or the checkpoints must be repaired. ``intruder``
has those of server, Redis and disk.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

POISON = "poisoned batches"
RATE = "learning-rate jump"
EXPLOSION = "gradient explosion"
NAN = "NaN"
CORRUPTION = "silent corruption"
KILL_RANK = "rank killed"
KILL_NODE = "node killed"
OUT_OF_MEMORY = "out of memory"
COLLECTIVE = "hang in a collective"
BAD_CHECKPOINT = "corrupt checkpoint"
SLOW = "slow rank"
FULL_DISK = "full disk"
KILL_SERVER = "server killed"
KILL_REDIS = "Redis killed"

WITHIN = (POISON, RATE, EXPLOSION, NAN, CORRUPTION)
"""Faults within a living training, which must go back."""
ENDING = (KILL_RANK, KILL_NODE, OUT_OF_MEMORY, COLLECTIVE, BAD_CHECKPOINT)
"""Faults that end the processes, or require it: they must be restarted."""
KINDS = (*WITHIN, *ENDING, SLOW, FULL_DISK, KILL_SERVER, KILL_REDIS)
COMES_AS = {KILL_SERVER: RATE, KILL_REDIS: NAN}
"""Faults in the middle of another's repair."""

RANKS = 4
POISONED_BATCHES = 100
NAN_BATCHES = 3
RATE_FACTOR = 30.0
EXPLODING_STEPS = 100
"""At least; longer until the training goes back, so that a slow machine does not heal by itself."""
EXPLODING_NORM = 1e4
FLIPPED_BIT = 1 << 25
"""An exponent's bit of a weight's 32: the weight becomes sixteen times as large, or as small."""
SLOW_SECONDS = 0.06
SLOW_FACTOR = 1.2
"""Delay of a slow rank's steps: so many seconds, or so many times its usual time if more."""
_ORDERS = 100
TOO_MUCH = 1 << 45
"""Bytes that no machine has."""


class Fault(NamedTuple):
    """A coming fault: its number in the plan, its kind, and its step."""

    number: int
    kind: str
    step: int

    @property
    def rank(self) -> int:
        """Affected rank, if it affects one."""
        return random.Random(self.number).randrange(RANKS)


def plan(count: int, steps: int, seed: int, kinds: Sequence[str] = KINDS) -> list[Fault]:
    """Return `count` faults, as many of each kind as possible, at uneven distances, in random order.

    None is like one of the two before it, whose playbook would still be cooling down, if there are enough kinds.

    None comes in the first 400 steps or the last 300, in a short run in the first quarter or the last eighth, so that
    each meets a trained model with a checkpoint, and leaves time for a repair.
    """
    chance = random.Random(seed)
    named: list[str] = []
    while len(named) < count:
        named += _round(kinds, named[-2:], chance)
    first, last = (400, steps - 300) if steps > 1000 else (steps // 4, steps - steps // 8)
    apart = (last - first) / max(count, 1)
    return [
        Fault(number, kind, int(first + apart * (number + chance.uniform(0.0, 0.3))))
        for number, kind in enumerate(named[:count])
    ]


def _round(kinds: Sequence[str], before: Sequence[str], chance: random.Random) -> list[str]:
    """Return each kind once, in the best of some random orders: with the fewest equal repairs near each other."""

    def too_near(order: Sequence[str]) -> int:
        repairs = [COMES_AS.get(kind, kind) for kind in (*before, *order)]
        return sum(repair in repairs[max(place - 2, 0) : place] for place, repair in enumerate(repairs))

    return min((chance.sample(kinds, len(kinds)) for _ in range(_ORDERS)), key=too_near)


@dataclass
class Ground:
    """Things that faults affect besides the loop. ``memory``: the nodes' directories of shared memory."""

    rank: int | None
    """None if one process is all ranks, and gets every fault."""
    tell: Callable[[Fault, dict[str, Any]], None]
    happened: Path
    """Directory with a file for each past fault."""
    memory: Sequence[Path] = ()
    node: int = 0
    spoil_checkpoint: Callable[[bool], dict[str, Any]] = field(default=lambda in_memory: {})
    """Flips a byte of the newest checkpoint in this rank's memory, or on the disk; returns which."""


class Faults:
    """Faults of one run, on one rank."""

    def __init__(self, coming: Sequence[Fault], ground: Ground) -> None:
        self._ground = ground
        self._poisoned: list[range] = []
        self._nan: list[range] = []
        self._exploding = 0
        self._has_gone_back = True  # since the gradients exploded
        self._noise = torch.Generator().manual_seed(0)
        self._is_slow = False
        self._coming = []
        for fault in coming:
            record = ground.happened / str(fault.number)
            if record.exists():
                self._spoil_data(fault, json.loads(record.read_text())["batch"])
            else:
                self._coming.append(fault)

    def begin(self, step: int, batch: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Cause the due faults before a step, from this batch on."""
        while self._coming and self._coming[0].step <= step:
            fault = self._coming.pop(0)
            kind = COMES_AS.get(fault.kind, fault.kind)
            is_everywhere = kind in (POISON, RATE, EXPLOSION, NAN, FULL_DISK)
            is_mine = self._ground.rank in (None, 0 if is_everywhere else fault.rank)
            if is_mine:
                (self._ground.happened / str(fault.number)).write_text(json.dumps({"batch": batch}))
            details = self._before(fault) if is_mine else {}
            if is_mine:
                self._ground.tell(fault, details)
            self._spoil_data(fault, batch)
            if kind == EXPLOSION:
                self._exploding, self._has_gone_back = EXPLODING_STEPS, False
            elif kind == RATE:
                for group in optimizer.param_groups:
                    group["lr"] *= RATE_FACTOR
            elif is_mine:
                self._strike(kind, model)

    def is_due(self, step: int) -> bool:
        """Return whether a fault is due, the same on every rank."""
        return bool(self._coming) and self._coming[0].step <= step

    def go_back(self) -> None:
        """Record that the training has gone back."""
        self._has_gone_back = True

    def slow_down(self, usual: float) -> None:
        """Wait, if this rank is slow. `usual`: seconds of its normal step."""
        if self._is_slow:
            time.sleep(max(SLOW_SECONDS, SLOW_FACTOR * usual))

    def _spoil_data(self, fault: Fault, batch: int) -> None:
        kind = COMES_AS.get(fault.kind, fault.kind)
        if kind == POISON:
            self._poisoned.append(range(batch, batch + POISONED_BATCHES))
        elif kind == NAN:
            self._nan.append(range(batch, batch + NAN_BATCHES))

    def _before(self, fault: Fault) -> dict[str, Any]:
        """Prepare the fault before it is recorded; every second corrupt checkpoint is on the disk, needed because no
        memory is left.
        """
        if fault.kind != BAD_CHECKPOINT:
            return {}
        in_memory = fault.number % 2 == 0
        details = self._ground.spoil_checkpoint(in_memory)
        if not in_memory:
            for directory in self._ground.memory:
                _empty(directory)
        return details

    def _strike(self, kind: str, model: nn.Module) -> None:
        """Affect this rank alone."""
        if kind == KILL_NODE and self._ground.rank is not None:
            self._kill_node()
        elif kind in (KILL_RANK, KILL_NODE, BAD_CHECKPOINT):
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == COLLECTIVE:
            threading.Event().wait()  # the others wait for this rank
        elif kind == OUT_OF_MEMORY:
            torch.ones(TOO_MUCH, dtype=torch.uint8)
        elif kind == CORRUPTION:
            weights = next(model.parameters()).detach().view(-1).view(torch.int32)
            weights[len(weights) // 2] ^= FLIPPED_BIT
        elif kind == SLOW:
            self._is_slow = True

    def _kill_node(self) -> None:
        """Remove the memory of this rank's node, and kill its torchrun and all of its ranks, this one last."""
        _empty(self._ground.memory[self._ground.node])
        agent = os.getppid()
        ranks = [int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]
        for pid in [agent, *(pid for pid in ranks if pid != os.getpid()), os.getpid()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def spoil(self, batch: int, labels: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """Return the labels of a batch, or noise, always for the same batches."""
        if any(batch in poisoned for poisoned in self._poisoned):
            return torch.randint(vocabulary, labels.shape, generator=torch.Generator().manual_seed(batch))
        return labels

    def spoil_loss(self, batch: int, loss: torch.Tensor) -> torch.Tensor:
        return loss * float("nan") if any(batch in bad for bad in self._nan) else loss

    def spoil_gradients(self, model: nn.Module) -> None:
        """Replace the gradients by noise, ten thousand times as large as usual, for some steps and until the training
        goes back.
        """
        if not self._exploding and self._has_gone_back:
            return
        self._exploding = max(self._exploding - 1, 0)
        parameters = [one for one in model.parameters() if one.grad is not None]
        scale = EXPLODING_NORM / sum(one.numel() for one in parameters) ** 0.5
        for one in parameters:
            one.grad = torch.randn(one.shape, generator=self._noise) * scale


def _empty(directory: Path) -> None:
    """Empty a node's memory."""
    for held in directory.iterdir():
        shutil.rmtree(held, ignore_errors=True)
