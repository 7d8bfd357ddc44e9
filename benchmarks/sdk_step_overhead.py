"""Cost of an attached and idle SDK for a training step: the same loop with it over without.

The loop is a plain PyTorch one over a `DataLoader`; its step computes for a given time. Blocks of each kind take turns
in one run, connected to a Redis, and the median step of each kind counts. On a busy machine the fastest tenth is
disturbed less, and is printed too.

A third kind is attached without fingerprints of its batches, so that their share shows. The batches are those of a
language model: three tensors of tokens, 16 by 2048. One record is written for ten steps.

The SDK's own threads take turns with the training in Python. Their processor time is printed last; a training that
never waits in C could lose as much.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils.data import DataLoader, TensorDataset

import trainmedic
import trainmedic.torch
from tests.conftest import RedisServer
from trainmedic.torch import verification

BATCH, LENGTH = 16, 2048
WITHOUT, ATTACHED, UNPRINTED = "without", "attached", "attached, without fingerprints"


class Loop:
    """A model of one weight, whose step takes a given time."""

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


def timed(steps: Iterator[None], count: int) -> list[float]:
    """Return the seconds of each of so many steps, with everything between them."""
    found = []
    began = time.perf_counter()
    for _ in range(count):
        next(steps)
        ended = time.perf_counter()
        found.append(ended - began)
        began = ended
    return found


Steps = list[float]


def measure(url: str, directory: Path, seconds: float, rounds: int, count: int) -> tuple[dict[str, Steps], float]:
    """Return the seconds of each step, without the SDK and with it; and its threads' processor share."""
    loop = Loop(seconds)
    with trainmedic.connect(job="idle", redis_url=url, log_dir=directory / "logs") as medic:
        attached = loop.attached(medic, directory / "saved")
        kinds: dict[str, tuple[Iterator[None], list[float]]] = {
            WITHOUT: (loop.without(), []),
            ATTACHED: (attached, []),
            UNPRINTED: (attached, []),
        }
        for steps, _ in kinds.values():
            timed(steps, 5)  # what happens once
        gc.collect()
        began = time.perf_counter(), threads_beside()
        for number in range(rounds):
            order: Callable[[Any], Any] = reversed if number % 2 else list
            for kind in order(list(kinds)):
                steps, found = kinds[kind]
                with no_fingerprints() if kind == UNPRINTED else nullcontext():
                    found.extend(timed(steps, count))
        beside = (threads_beside() - began[1]) / (time.perf_counter() - began[0])
        attached.close()  # type: ignore[attr-defined]
    return {kind: found for kind, (_, found) in kinds.items()}, beside


def threads_beside() -> float:
    """Return the processor seconds of all threads but this one."""
    return time.process_time() - time.thread_time()


def no_fingerprints() -> Any:
    def nothing(batch: Any) -> int:  # a mock would keep each batch that it is called with
        return 0

    return mock.patch.object(verification, "fingerprint", nothing)


def compared(without: Steps, attached: Steps, statistic: Callable[[Steps], float]) -> str:
    one, other = statistic(without), statistic(attached)
    return f"{other / one:.5f} ({(other - one) * 1e6:+.1f} us)"


def fast(steps: Steps) -> float:
    """Return the step time that a tenth of the steps undercut."""
    return statistics.quantiles(steps, n=10)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30, help="blocks of each kind")
    parser.add_argument("--block", type=float, default=0.5, metavar="SECONDS", help="about how long a block takes")
    parser.add_argument("--step", type=float, nargs="+", default=[0.01, 0.1], metavar="SECONDS")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        server = RedisServer(Path(directory))
        server.start()
        try:
            for seconds in options.step:
                count = max(int(options.block / seconds), 1)
                steps, beside = measure(server.url, Path(directory), seconds, options.rounds, count)
                for name, base, kind in (
                    ("SDK attached", WITHOUT, ATTACHED),
                    ("  of it fingerprints", UNPRINTED, ATTACHED),
                ):
                    median, tenth = (compared(steps[base], steps[kind], how) for how in (statistics.median, fast))
                    print(f"{name}, step of {seconds * 1e3:g} ms: {median} x, the fastest tenth {tenth} x")
                print(f"threads of the SDK, step of {seconds * 1e3:g} ms: {beside:.4%} of a processor")
        finally:
            server.kill()


if __name__ == "__main__":
    main()
