"""A DDP training under torchrun that meets with an accident: ``fragile_job.py DIRECTORY ACCIDENT STEPS``.

It goes on from its newest checkpoint by itself, and writes its last step and weights as ``result-<rank>.json``. The
accident happens to the last rank at step 25: ``killed`` and ``hangs`` in the first attempt, ``raises`` in each;
``none``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import trainmedic
import trainmedic.torch

AT = 25


def meet_with(accident: str, step: int) -> None:
    attempt = int(os.environ["TRAINMEDIC_ATTEMPT"])
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if step != AT or not is_last or (attempt > 1 and accident != "raises"):
        return
    if accident == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif accident == "raises":
        raise ValueError("a bad batch")
    elif accident == "hangs":
        print("comes to no collective", flush=True)
        time.sleep(3600)  # the other ranks wait for it in their collective


def main(directory: Path, accident: str, steps: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(64, 4))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, seed=1))
    medic = trainmedic.connect(job="fragile", hang_floor=1.0)
    run = trainmedic.torch.attach(
        medic,
        model=model,
        optimizer=optimizer,
        loader=loader,
        checkpoints=directory / "checkpoints",
        checkpoint_every=10,
        accumulation=1,
    )
    resumed = run.resume()
    print(f"rank {dist.get_rank()} begins at {resumed}", flush=True)
    if b"warm.py" in Path("/proc/self/cmdline").read_bytes():
        print("in a process that was warm", flush=True)
    print(f"{dist.get_world_size()} ranks accumulate {run.accumulation}", flush=True)
    pause = float(os.environ.get("STEP_SECONDS", "0.01"))
    for (batch,) in run.batches(steps=steps):
        with run.step() as step:
            meet_with(accident, step.number)
            loss = model(batch).pow(2).mean()
            step.backward(loss)
            step.update()
            step.report(loss=loss.item())
        time.sleep(pause)
    weights = [value.tolist() for value in model.state_dict().values()]
    result = {"step": run.global_step, "resumed": resumed, "weights": weights}
    (directory / f"result-{dist.get_rank()}.json").write_text(json.dumps(result))
    run.close()
    medic.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
