"""A training of several ranks with in-memory checkpoints, as a program for tests: ``memory_ranks.py ddp|fsdp [STEPS]``.

Every rank writes what it has come to: ``resumed-<rank>.jsonl`` the step of each start, ``at-<rank>`` the present step,
``ended-<rank>.pt`` the state at the end, and ``calm-<rank>.pt`` that of another training, to the same step, to which
nothing happened. The file ``go`` lets it train past step ``HOLD``. Each node has as many ranks as RANKS_PER_NODE says;
DISK_EVERY is how many steps lie between two checkpoints on the disk. Not here: who is killed, and what is expected.
"""

from __future__ import annotations

import json
import logging
import os
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
from torch.utils.data import DataLoader, DistributedSampler

import trainmedic
import trainmedic.torch

HOLD = 37
EVERY = 5


def local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach().clone()


def train(medic: trainmedic.Medic, kind: str, steps: int | None, calm: bool) -> int:
    """Until so many steps are done, or it is told to stop; the step that it has come to."""
    rank = dist.get_rank()
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.3), nn.BatchNorm1d(9), nn.Linear(9, 1))
    if kind == "fsdp":
        fully_shard(model[3])
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)
    data = torch.randn(101, 4, generator=torch.Generator().manual_seed(7))
    with trainmedic.torch.attach(
        medic,
        model=model,
        optimizer=optimizer,
        loader=DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=True, seed=1)),
        seed=5,
        checkpoints="calm" if calm else "saved",
        checkpoint_every=int(os.environ.get("DISK_EVERY", "1000")),
        memory=None if calm else trainmedic.torch.Memory(EVERY, share=1e6, asynchronous=True, replica_every=0.02),
    ) as run:
        if not calm:
            with Path(f"resumed-{rank}.jsonl").open("a") as file:
                file.write(json.dumps({"step": run.resume()}) + "\n")
        for batch in run.batches(steps=steps):
            with run.step() as step:
                loss = model(batch).square().mean() + 0.1
                step.backward(loss)
                norm = step.update(max_norm=1.0)
                step.report(loss=loss, grad_norm=norm)
            if run.training.memory is not None:
                run.training.memory.background.settle(10)
                Path(f"at-{rank}").write_text(str(run.global_step))
            while run.global_step == HOLD and not calm and not Path("go").exists():
                time.sleep(0.01)
        held = {
            "step": run.global_step,
            "parameters": [local(parameter) for parameter in model.parameters()],
            "moments": [local(state["exp_avg_sq"]) for state in optimizer.state.values()],
            "buffers": [buffer.clone() for buffer in model.buffers()],
            "random": torch.get_rng_state(),
        }
        torch.save(held, f"{'calm' if calm else 'ended'}-{rank}.pt")
        return run.global_step


def main(kind: str, steps: int | None) -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    os.environ["TRAINMEDIC_NODE"] = f"node-{rank // int(os.environ.get('RANKS_PER_NODE', '1'))}"
    with trainmedic.connect(job="llm-1") as medic, Path(f"rank-{rank}.jsonl").open("a", buffering=1) as log:
        log.write(json.dumps({"pid": os.getpid()}) + "\n")
        reached = train(medic, kind, steps, calm=False)
        train(medic, kind, reached, calm=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
