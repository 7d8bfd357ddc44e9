"""The loop of ``sdk_step_overhead``, and a program that runs it with the SDK that it is given.

The program is called with the URL of Redis and a directory. It prints where the SDK is; then for each number that it
reads it does so many attached steps, and as many without the SDK, and prints the processor seconds of one of each. Only
its thread counts, without those of the SDK.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import trainmedic
import trainmedic.torch

BATCH, LENGTH = 16, 2048


class Loop:
    """A model of one weight, so that nearly all of a step is the time that it is told to take."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        tokens = torch.randint(0, 50_000, (BATCH * 40, LENGTH))
        self.loader = DataLoader(TensorDataset(tokens, torch.ones_like(tokens), tokens.roll(1)), BATCH, shuffle=True)

    def work(self, batch: Any) -> Any:
        until = time.perf_counter() + self.seconds
        self.optimizer.zero_grad()
        loss = self.model(batch[0][:, :4].float()).square().mean()
        loss.backward()
        self.optimizer.step()
        while time.perf_counter() < until:
            pass
        return loss

    def without(self) -> Iterator[None]:
        while True:
            for batch in self.loader:
                self.work(batch)
                yield

    def attached(self, medic: trainmedic.Medic, directory: Path) -> Iterator[None]:
        run = trainmedic.torch.attach(
            medic, model=self.model, optimizer=self.optimizer, loader=self.loader, checkpoints=directory
        )
        with run:
            for batch in run.batches():
                with run.step() as step:
                    loss = self.work(batch)
                    step.report(loss=loss)
                yield


def seconds_of(steps: Iterator[None], count: int) -> float:
    """The processor seconds of a step of this thread, the mean of so many."""
    began = time.thread_time()
    for _ in range(count):
        next(steps)
    return (time.thread_time() - began) / count


def main() -> None:
    url, directory = sys.argv[1:]
    torch.set_num_threads(1)
    loop = Loop(0.0)
    print(trainmedic.__file__, flush=True)
    with trainmedic.connect(job=Path(directory).name, redis_url=url, log_dir=Path(directory) / "logs") as medic:
        attached, without = loop.attached(medic, Path(directory) / "saved"), loop.without()
        for line in sys.stdin:
            print(*(seconds_of(steps, int(line)) for steps in (attached, without)), flush=True)
        attached.close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
