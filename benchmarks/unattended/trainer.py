"""One training run, as a process: ``python -m benchmarks.unattended.trainer --steps 18000 …``.

With ``--medic`` it is protected by `trainmedic.torch`, as a user's script would be. Each event is printed
as a line of JSON, with the time: each fault when it happens, each step that is gone back to, the end. Who
calls it: ``__main__``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import trainmedic
from benchmarks.unattended import corpus, faults
from benchmarks.unattended.model import BATCH, CharModel, Rows, validation_loss
from trainmedic.torch import attach

_PEAK_RATE = 3e-3
_LAST_RATE = 3e-4
_SPARE = 3
"""Times as many batches as steps: what is skipped and gone back over comes out of it."""


class Training:
    """The parts of a run, and one step of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(options.seed)
        self.text = corpus.load()
        self.model = CharModel(self.text.vocabulary)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=_PEAK_RATE)
        # Works on from the present rate, as most schedulers do: a rate that was changed stays changed.
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, options.steps, eta_min=_LAST_RATE)
        rows = Rows(self.text.training, options.steps * BATCH * _SPARE, options.seed)
        self.loader: DataLoader[Any] = DataLoader(rows, batch_size=BATCH)
        self.faults = faults.Faults([faults.Fault(*one) for one in json.loads(options.faults)], self._tell_fault)
        self.executed = 0
        self.step = 0
        self.is_protected = options.medic
        self._pace = options.pace
        self._began: float | None = None
        self._took: dict[int, float] = {}

    def train(self, batch: tuple[torch.Tensor, torch.Tensor], step: int) -> tuple[float, float]:
        """One step, no faster than the pace: the loss and the gradient norm before clipping."""
        began = time.perf_counter()
        self._began = self._began or began
        self.step = step
        result = self._step(batch, step)
        time.sleep(max(0.0, self._pace - (time.perf_counter() - began)))
        self._took[step] = time.perf_counter() - began
        return result

    def _step(self, batch: tuple[torch.Tensor, torch.Tensor], step: int) -> tuple[float, float]:
        numbers, rows = batch
        number = int(numbers[0]) // BATCH
        self.faults.begin(step, number, self.optimizer)
        labels = self.faults.spoil(number, rows[:, 1:], self.text.vocabulary)
        loss = self.faults.spoil_loss(number, self.model.loss(rows[:, :-1], labels))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.faults.spoil_gradients(self.model)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.executed += 1
        return loss.item(), norm.item()

    def validate(self) -> float:
        return validation_loss(self.model, self.text)

    def spent(self) -> dict[str, float]:
        """Seconds since the first step began, and those of them in steps that count: the last time of each."""
        assert self._began is not None
        return {"seconds": time.perf_counter() - self._began, "useful": sum(self._took.values())}

    def _tell_fault(self, fault: faults.Fault) -> None:
        # Of a run that nobody looks after, a hang is the last that is heard.
        result = {"validation": self.validate()} if fault.kind == faults.HANG and not self.is_protected else {}
        tell("fault", number=fault.number, kind=fault.kind, step=self.step, executed=self.executed, **result)


def unprotected(training: Training, options: argparse.Namespace) -> None:
    os.nice(5)  # it is in nobody's way: what it tells does not depend on how long it takes
    for step, batch in enumerate(training.loader, 1):
        loss, _ = training.train(batch, step)
        if loss != loss:
            tell_once("nan", step=step)
        if step == options.steps:
            return


def protected(training: Training, options: argparse.Namespace) -> None:
    medic = trainmedic.connect("unattended", metrics_port=options.metrics_port, hang_floor=options.hang_floor)
    with (
        medic,
        attach(
            medic,
            model=training.model,
            optimizer=training.optimizer,
            scheduler=training.scheduler,
            loader=training.loader,
            checkpoints=options.checkpoints,
            checkpoint_every=options.checkpoint_every,
        ) as run,
    ):
        for batch in run.batches(steps=options.steps):
            with run.step() as step:
                loss, norm = training.train(batch, step.number)
                step.report(loss=loss, grad_norm=norm)
            if run.global_step < step.number:
                tell("back", step=run.global_step, left=step.number)


_told: set[str] = set()


def tell(event: str, **details: Any) -> None:
    print(json.dumps({"event": event, "time": time.time(), **details}), flush=True)


def tell_once(event: str, **details: Any) -> None:
    if event not in _told:
        _told.add(event)
        tell(event, **details)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.0, metavar="SECONDS", help="least time of a step")
    parser.add_argument("--faults", default="[]", help="JSON: [[number, kind, step], …]")
    parser.add_argument("--medic", action="store_true", help="let Trainmedic look after it")
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--checkpoint-every", type=int, default=50)
    parser.add_argument("--metrics-port", type=int)
    parser.add_argument("--hang-floor", type=float, default=60.0)
    return parser.parse_args()


def main() -> None:
    options = parse()
    training = Training(options)
    tell("started", digest=training.text.digest, characters=len(training.text.training))
    run = protected if options.medic else unprotected
    run(training, options)
    spent = training.spent()
    tell("finished", step=training.step, executed=training.executed, validation=training.validate(), **spent)


if __name__ == "__main__":
    main()
