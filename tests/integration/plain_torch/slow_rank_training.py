"""A training of several ranks of which one is slow, as a program for tests under torchrun.

``slow_rank_training.py KIND PART RANK``: of a model that is wrapped as KIND (``ddp``, ``buffers`` for one whose buffers
are rank 0's, ``fsdp``), rank RANK takes 0.1 s longer for its PART of each step (``data``, ``compute``). It trains until
it is ended, and rank 0 writes the port of its metrics to ``port``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import trainmedic
import trainmedic.torch

USUAL, SLOW = 0.02, 0.1  # seconds


class Samples(Dataset[torch.Tensor]):
    def __init__(self, delay: float) -> None:
        self.delay = delay

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.delay)
        return torch.randn(8)


class Computing(nn.Module):
    """A layer that takes its time."""

    def __init__(self, delay: float) -> None:
        super().__init__()
        self.delay = delay
        self.linear = nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self.delay)
        return self.linear(inputs)  # type: ignore[no-any-return]


def wrapped(model: nn.Module, kind: str) -> Any:
    if kind == "fsdp":
        return fully_shard(model)
    return DistributedDataParallel(model)


def main(kind: str, part: str, slow_rank: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank = dist.get_rank()
    delay = {"data": USUAL / 2, "compute": USUAL}
    if rank == int(slow_rank):
        delay[part] += SLOW
    layers = [Computing(delay["compute"]), nn.Linear(8, 1)]
    model = wrapped(nn.Sequential(*layers, *([nn.BatchNorm1d(1)] if kind == "buffers" else [])), kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with trainmedic.connect("llm-1", metrics_port=0) as medic:
        loader = DataLoader(Samples(delay["data"] / 4), 4)
        run = trainmedic.torch.attach(medic, model=model, optimizer=optimizer, loader=loader)
        if rank == 0:
            Path("port.part").write_text(str(medic.metrics_port))
            Path("port.part").rename("port")
        for batch in run.batches():
            with run.step() as step:
                loss = model(batch).square().mean()
                step.backward(loss)
                step.update()
                step.report(loss=loss)


main(*sys.argv[1:])
