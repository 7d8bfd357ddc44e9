"""A training of three ranks on one of which a weight changes by itself, as a program for tests.

Before step ``CHANGES`` one bit of a weight of rank 1 is flipped, and after step ``DIES`` rank 0 dies; both in the first
attempt only. There is a checkpoint on the disk every five steps, written in the background, and one in memory every
step. Each start adds the step that it has resumed at to ``resumed-<rank>.jsonl``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import trainmedic
import trainmedic.torch

CHANGES, DIES, STEPS = 13, 17, 25


def main(is_first: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Linear(4, 4))
    data = torch.randn(120, 4, generator=torch.Generator().manual_seed(7))
    with (
        trainmedic.connect(job="llm-1") as medic,
        trainmedic.torch.attach(
            medic,
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
            loader=DataLoader(data, 2, sampler=DistributedSampler(data)),
            checkpoints="saved",
            checkpoint_every=5,
            keep=10,
            memory=trainmedic.torch.Memory(1, share=1e6, asynchronous=True),
        ) as run,
    ):
        with Path(f"resumed-{rank}.jsonl").open("a") as file:
            file.write(json.dumps(run.resume()) + "\n")
        for batch in run.batches(steps=STEPS):
            with run.step() as step:
                if is_first and rank == 1 and step.number == CHANGES:
                    next(model.parameters()).detach().view(-1).view(torch.int32)[0] ^= 1 << 20
                loss = model(batch).square().mean()
                step.backward(loss)
                step.report(loss=loss, grad_norm=step.update(max_norm=1.0))
            assert run.training.memory is not None
            run.training.memory.background.settle(10)
            run.training.storage.background.settle()  # type: ignore[union-attr]
            dist.barrier()
            if is_first and run.global_step == DIES and rank == 0:
                os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(is_first=sys.argv[1] == "first")
