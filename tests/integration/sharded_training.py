"""A training of two ranks that shard the model, as a program for tests: ``sharded_training.py KIND...``.

Rank 1 computes longer. Each rank measures with a stopwatch of its own how long it is in the collectives of
torch.distributed, and writes beside it what the SDK says, per step and by kind, as ``waits-<rank>.json``. A kind is
``fully_shard``, ``flat`` (FullyShardedDataParallel) or ``zero-<stage>`` of DeepSpeed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import trainmedic
import trainmedic.deepspeed
import trainmedic.torch

STEPS = 12
SLOWER = 0.05
"""Seconds that rank 1 computes longer in each step."""
COLLECTIVES = (
    *("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single", "all_reduce"),
    *("all_gather", "broadcast", "reduce", "barrier"),
)
"""By the names of several releases."""


class Stopwatch:
    """The time in collectives, whoever calls them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        for name in filter(partial(hasattr, dist), COLLECTIVES):
            setattr(dist, name, self._around(getattr(dist, name)))

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            answer = self._timed(function, *arguments, **named)
            if callable(getattr(answer, "wait", None)):
                return Pending(answer, self)
            return answer

        return timed

    def _timed(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        self._depth += 1
        try:
            return function(*arguments, **named)
        finally:
            self._depth -= 1
            if not self._depth:
                self.seconds += time.perf_counter() - began


class Pending:
    """A collective that has begun."""

    def __init__(self, work: Any, stopwatch: Stopwatch) -> None:
        self._work, self._stopwatch = work, stopwatch

    def wait(self, *arguments: Any) -> Any:
        return self._stopwatch._timed(self._work.wait, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class Slow(nn.Module):
    """A layer that needs time of its own, on rank 1 more."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01 + (SLOWER if dist.get_rank() == 1 else 0.0))
        return inputs


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), Slow(), nn.Linear(64, 64), nn.Linear(64, 1))


def sharded(medic: trainmedic.Medic, kind: str) -> Any:
    """The run of a plain loop, and how it is stepped."""
    if kind == "fully_shard":
        trained = model()
        for layer in trained:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(trained)
    else:
        inner = model()
        inner[2] = FullyShardedDataParallel(inner[2], device_id=torch.device("cpu"))
        trained = FullyShardedDataParallel(inner, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    run = trainmedic.torch.attach(medic, model=trained, optimizer=optimizer)
    return run, trained, lambda loss: (loss.backward(), optimizer.step(), optimizer.zero_grad())


def engine(medic: trainmedic.Medic, stage: int) -> Any:
    import deepspeed  # type: ignore[import-not-found]

    trained = model()
    made, _, _, _ = deepspeed.initialize(
        model=trained,
        model_parameters=trained.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "steps_per_print": 1_000_000,
        },
    )
    run = trainmedic.deepspeed.attach(medic, made)
    return run, made, lambda loss: (made.backward(loss), made.step())


def measured(kind: str, stopwatch: Stopwatch) -> dict[str, Any]:
    """Seconds per step: those of the stopwatch, those of the SDK, and the step's."""
    rank = dist.get_rank()
    medic = trainmedic.connect(job=f"sharded-{kind}", rank=rank, world_size=2, redis_url="redis://127.0.0.1:1/0")
    made = engine(medic, int(kind[-1])) if kind.startswith("zero") else sharded(medic, kind)
    run, trained, update = made
    marks, began = [], [time.perf_counter()]
    for _ in range(STEPS):
        with run.step() as step:
            loss = trained(torch.randn(8, 16)).square().mean()
            update(loss)
            step.report(loss=float(loss.detach()))
        marks.append(stopwatch.seconds)
        began.append(time.perf_counter())
    # A report is of the steps before its own. The first step is left out: groups are made in it.
    counted = list(medic.progress.pace._intervals)[-(STEPS - 2) :]
    found = {
        "stopwatch": (marks[-2] - marks[0]) / len(counted),
        "wait": sum(interval.wait_seconds for interval in counted) / len(counted),
        "own": medic.progress.pace.parts().own,
        "step": (began[-2] - began[1]) / len(counted),
    }
    run.close()
    medic.close()
    return found


def main() -> None:
    stopwatch = Stopwatch()
    kinds = sys.argv[1:]
    if any(kind.startswith("zero") for kind in kinds):
        import deepspeed
        import deepspeed.ops  # type: ignore[import-not-found]

        deepspeed.ops.__compatible_ops__.clear()  # else it calls a compiler, for collectives that gloo has as well
        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    found = {kind: measured(kind, stopwatch) for kind in kinds}
    Path(f"waits-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
