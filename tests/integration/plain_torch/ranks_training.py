"""A training of several ranks, as a program for tests under torchrun: ``ranks_training.py ddp|fsdp``.

It trains until it is told to stop, several times in a row; of each, every rank writes what it has come to as
``<name>-<rank>.pt``. Not here: what is ordered meanwhile, and what is expected.

- ``ordered``: with whatever the test orders.
- ``back``: where the first one begins if it is started again.
- ``calm-then``, ``calm``: anew, with nothing ordered, to that step and to the one that the first one came to.
- ``resumed``: as if the first one had been started again, to the same step.
- ``broken``: with a last rank that cannot load a checkpoint into place. How it ends is in ``broken-<rank>.json``.

``ranks_training.py fsdp alone``, as a single rank, only goes back to the first one's checkpoint: ``alone-0.pt``.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import trainmedic
import trainmedic.torch


class Augmented(Dataset[torch.Tensor]):
    """Samples that look different each time they are drawn."""

    def __len__(self) -> int:
        return 101

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4) + index / 101 + random.random()


class Training:
    """One training from its beginning, in a directory of its own unless that of another is named."""

    def __init__(self, medic: trainmedic.Medic, kind: str, directory: str) -> None:
        torch.manual_seed(3)
        rank = dist.get_rank()
        model = nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.3), nn.BatchNorm1d(9), nn.Linear(9, 1))
        if kind == "fsdp":
            fully_shard(model[3])
            fully_shard(model)
        self.model: Any = model if kind == "fsdp" else DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = lr_scheduler.CosineAnnealingLR(self.optimizer, 100_000)
        torch.manual_seed(100 + rank)  # dropout and augmentation of its own
        random.seed(100 + rank)
        dataset = Augmented()
        sampler: Any = DistributedSampler(dataset, shuffle=True, seed=1)
        self.losses: dict[int, float] = {}
        self.run = trainmedic.torch.attach(
            medic,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loader=DataLoader(dataset, 4, sampler=sampler),
            checkpoints=directory,
            checkpoint_every=10,
            keep=None,
            seed=5,
            rollbacks=None,
        )

    def train(self, steps: int | None = None) -> None:
        for batch in self.run.batches(steps=steps):
            with self.run.step() as step:
                loss = self.model(batch).square().mean() + 0.1
                step.backward(loss)
                norm = step.update(max_norm=1.0)
                step.report(loss=loss, grad_norm=norm)
                self.losses[step.number] = loss.item()
            Path(f"at-{dist.get_rank()}").write_text(str(self.run.global_step))
            time.sleep(0.002 if steps is None else 0)

    def write(self, name: str) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        held = {
            "step": self.run.global_step,
            "rates": [group["lr"] for group in self.optimizer.param_groups],
            "losses": self.losses,
            "random": torch.get_rng_state(),
            "parameters": {name: _whole(one) for name, one in self.model.named_parameters()},
            "tensors": [_local(one) for one in _tensors(state)],
            "epoch": self.run.epoch,
        }
        file = Path(f"{name}-{dist.get_rank()}.pt")
        torch.save(held, file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)


def _tensors(held: Any) -> list[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        return [held]
    return [tensor for one in held.values() for tensor in _tensors(one)] if isinstance(held, dict) else []


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.clone()


def _whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.clone()


def break_down() -> None:
    """From now on loading into place fails on the last rank."""

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    if dist.get_rank() == dist.get_world_size() - 1:
        lr_scheduler.CosineAnnealingLR.load_state_dict = fail  # type: ignore[method-assign]


def main(kind: str, alone: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    with trainmedic.connect(job="llm-1") as medic, Path(f"rank-{rank}.jsonl").open("a", buffering=1) as log:
        log.write(json.dumps({"pid": os.getpid()}) + "\n")
        if alone:
            single = Training(medic, kind, "ordered")
            single.run.resume()
            single.write("alone")
            single.run.close()
            return
        ordered = Training(medic, kind, "ordered")
        ordered.run.resume()
        ordered.train()
        ordered.write("ordered")
        ordered.run.close()
        back = Training(medic, kind, "ordered")
        back.run.resume()
        back.write("back")
        back.run.close()
        calm = Training(medic, kind, "calm")
        calm.train(back.run.global_step)
        calm.write("calm-then")
        calm.train(ordered.run.global_step)
        calm.write("calm")
        calm.run.close()
        resumed = Training(medic, kind, "ordered")
        resumed.run.resume()
        resumed.train(ordered.run.global_step)
        resumed.write("resumed")
        resumed.run.close()
        broken = Training(medic, kind, "broken")
        break_down()
        ended = "nothing was raised"
        try:
            broken.train()
        except trainmedic.TrainmedicError as error:
            ended = f"{type(error).__name__}: {error}"
        Path(f"broken-{rank}.json").write_text(json.dumps({"ended": ended, "step": broken.run.global_step}))
        broken.run.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], "alone" in sys.argv)
