"""Cost of in-memory checkpoints for a training step: whole times with them over those without.

A step computes for a given time; parameters with AdamW's moments are there to be copied. Blocks of both kinds take
turns in one run, connected to a Redis; checkpoints on the disk are written in the background. The figure is the sum
over all steps of a kind, because a copy falls on few of them; next to it is the share of time that training waited in
the SDK for copies and for beginning to write.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import trainmedic
import trainmedic.torch
from tests.conftest import RedisServer
from trainmedic.torch.checkpoints.checkpoint_writer import CheckpointWriter
from trainmedic.torch.run import Run


class Loop:
    """A training whose steps take a given time, with so many parameters."""

    def __init__(self, seconds: float, parameters: int) -> None:
        self.seconds = seconds
        self.model = torch.nn.Linear(4, 1)
        self.model.ballast = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(parameters // 64)) for _ in range(64)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loader = DataLoader(TensorDataset(torch.randn(100_000, 4)), 8, shuffle=True)

    def work(self, batch: Any) -> torch.Tensor:
        until = time.perf_counter() + self.seconds
        self.optimizer.zero_grad()
        loss: torch.Tensor = (batch[0] @ self.model.weight.T).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        while time.perf_counter() < until:
            pass
        return loss

    def attached(self, run: Run) -> Iterator[None]:
        with run:
            for batch in run.batches():
                with run.step() as step:
                    loss = self.work(batch)
                    step.report(loss=loss)
                yield


class Waited:
    """Seconds that training has waited for checkpoints, and at which steps."""

    def __init__(self, run: Run) -> None:
        self.seconds: list[float] = []
        writer: CheckpointWriter = run._writer
        for name in ("save_to_memory", "save_when_due"):
            setattr(writer, name, self._timed(getattr(writer, name)))

    def _timed(self, save: Callable[[], None]) -> Callable[[], None]:
        def timed() -> None:
            began = time.perf_counter()
            save()
            self.seconds.append(time.perf_counter() - began)

        return timed


def block(steps: Iterator[None], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        next(steps)
    return time.perf_counter() - began


def measure(url: str, directory: Path, options: argparse.Namespace, seconds: float, parameters: int) -> str:
    count = max(int(options.block / seconds), 1)
    loops = {kind: Loop(seconds, parameters) for kind in ("without", "memory")}
    with (
        trainmedic.connect(job="without", redis_url=url) as plain,
        trainmedic.connect(job="memory", redis_url=url) as medic,
    ):
        memory = trainmedic.torch.Memory(every=options.every or "auto", asynchronous=True)
        runs = {}
        for kind, connected, extra in (
            ("without", plain, {}),
            ("memory", medic, {"memory": memory, "checkpoint_every": int(options.disk / seconds)}),
        ):
            loop = loops[kind]
            parts = {"model": loop.model, "optimizer": loop.optimizer, "loader": loop.loader}
            runs[kind] = trainmedic.torch.attach(connected, checkpoints=directory / kind, **parts, **extra)
        steps = {kind: loop.attached(runs[kind]) for kind, loop in loops.items()}
        for iterator in steps.values():
            block(iterator, 3 * count)  # what happens once: memory is made, and it is found out what a copy costs
        gc.collect()
        waited = Waited(runs["memory"])
        totals = dict.fromkeys(steps, 0.0)
        for number in range(options.rounds):
            for kind in reversed(steps) if number % 2 else steps:
                totals[kind] += block(steps[kind], count)
        kept = runs["memory"].training.memory
        assert kept is not None
        assert kept.pool is not None
        size = max((slot.mark.size for slot in kept.pool.complete() if slot.mark is not None), default=0)
        interval = kept.cadence.interval
        for iterator in steps.values():
            iterator.close()  # type: ignore[attr-defined]
    ratio, share = totals["memory"] / totals["without"], sum(waited.seconds) / totals["memory"]
    return (
        f"step of {seconds * 1e3:g} ms, {size / 1e6:.0f} MB: {ratio:.4f} x, waited {share:.3%} of the time; a copy "
        f"every {interval} steps ({interval * seconds:.1f} s), {len(waited.seconds)} saves of "
        f"{sum(waited.seconds) / max(len(waited.seconds), 1) * 1e3:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12, help="blocks of each kind")
    parser.add_argument("--block", type=float, default=3.0, metavar="SECONDS", help="about how long a block takes")
    parser.add_argument("--step", type=float, nargs="+", default=[0.01, 0.1], metavar="SECONDS")
    parser.add_argument("--millions", type=float, nargs="+", default=[0.1, 10.0], help="of parameters")
    parser.add_argument("--every", type=int, default=0, help="steps between two copies at least; 0 for auto")
    parser.add_argument("--disk", type=float, default=30.0, metavar="SECONDS", help="between two on the disk")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("TRAINMEDIC_JOB", "benchmark")
    with tempfile.TemporaryDirectory() as directory:
        server = RedisServer(Path(directory))
        server.start()
        try:
            for seconds in options.step:
                for millions in options.millions:
                    place = Path(directory) / f"{seconds}-{millions}"
                    print(measure(server.url, place, options, seconds, int(millions * 1e6)), flush=True)
        finally:
            server.kill()


if __name__ == "__main__":
    main()
