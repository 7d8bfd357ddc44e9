"""A training job, run by ``test_interrupts``, that hangs in the ways that it is told, one after the other.

    hanging_job.py REDIS_URL DIRECTORY event|sleep|socket|swallow|worker|between...

At every eighth step it hangs in the next of these ways, and prints that it does.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trainmedic
import trainmedic.torch

EVERY, BATCH = 8, 4


class Samples(Dataset[torch.Tensor]):
    """A sample of the second hang's batch blocks for ever, the first time that it is asked for."""

    def __init__(self, stuck: Path) -> None:
        self.stuck = stuck

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == EVERY * BATCH and self.stuck.exists():
            self.stuck.unlink()
            threading.Event().wait()
        return torch.full((3,), index / 200)


def hang(how: str) -> None:
    if how == "event":
        threading.Event().wait()
    elif how == "sleep":
        time.sleep(3600)
    elif how == "socket":
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            one.listen()
            one.accept()
    elif how == "swallow":  # as a user's retry loop does
        while True:
            with contextlib.suppress(Exception):
                time.sleep(3600)


def tell(*words: Any) -> None:
    print(*words, flush=True)


def main() -> None:
    url, directory, *ways = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if "worker" in ways:
        (directory / "stuck").touch()
    loader = DataLoader(Samples(directory / "stuck"), BATCH, num_workers=int("worker" in ways))
    others: list[int] = []
    signal.signal(trainmedic.torch.INTERRUPT_SIGNAL, lambda number, frame: others.append(number))
    steps = EVERY * (len(ways) + 1)
    with (
        trainmedic.connect(job="llm-1", redis_url=url, hang_floor=0.3) as medic,
        trainmedic.torch.attach(
            medic, model=model, optimizer=optimizer, loader=loader, checkpoints=directory / "saved",
            checkpoint_every=EVERY - 1, rollbacks=None,
        ) as run,
    ):  # fmt: skip
        for batch in run.batches(steps=steps):
            with run.step() as step:
                step.backward(model(batch).mean())
                step.update()
                step.report(loss=1.0)
                time.sleep(0.01)
                how = ways.pop(0) if step.number % EVERY == 0 and ways else ""
                if how:
                    tell("hangs:", how, step.number)
                    hang(how)
            if how == "between":
                while not medic.unanswered():
                    time.sleep(0.01)
                time.sleep(2)  # a step that hangs would be interrupted within this time
        signal.raise_signal(trainmedic.torch.INTERRUPT_SIGNAL)
    tell("finished", run.global_step, "others heard" if others else "", "stopping" if run.stopping else "")


if __name__ == "__main__":
    main()
