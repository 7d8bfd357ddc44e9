"""A training job of several ranks, as a program for tests: started by torchrun, or with a store of the test's.

Each rank writes what it applied, as a line of JSON, to ``rank-<n>.jsonl`` in the current directory, and
its process id before that. Ranks are late at random. ``LONE`` is the address of a store for ranks that
train without any collective: those go on when others die.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import trainmedic
import trainmedic.distributed


class Stopped(Exception):
    """The job was told to stop."""


def main() -> None:
    rank, lone = int(os.environ["RANK"]), os.environ.get("LONE")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model: Any = torch.nn.Linear(4, 1)
    store = None
    if lone:
        host, port = lone.split(":")
        store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=30))
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Path(f"rank-{rank}.jsonl").open("a", buffering=1) as log, trainmedic.connect(job="llm-1") as medic:
        log.write(json.dumps({"pid": os.getpid()}) + "\n")

        @medic.on("job.scale_lr")
        def scale(command: trainmedic.JobCommand) -> dict[str, Any]:
            for group in optimizer.param_groups:
                group["lr"] *= command.params["factor"]
            log.write(json.dumps({"step": medic.step, "id": command.id, "lr": optimizer.param_groups[0]["lr"]}) + "\n")
            return {"learning_rate": optimizer.param_groups[0]["lr"]}

        @medic.on("job.stop")
        def stop(_: trainmedic.JobCommand) -> None:
            stopping.append(True)

        stopping: list[bool] = []
        patience = float(os.environ.get("PATIENCE", "10"))
        trainmedic.distributed.share(medic, store=store, patience=patience)
        chance = random.Random(f"{rank}{time.time()}")
        for step in itertools.count():
            time.sleep(chance.choice((0.0, 0.001, 0.002, 0.02)))
            optimizer.zero_grad()
            loss = model(torch.full((2, 4), float(rank))).pow(2).mean()
            loss.backward()
            optimizer.step()
            medic.report(step=step, loss=loss)
            medic.commands(step)
            if step % 100 == 0:
                log.write(json.dumps({"at": step}) + "\n")
            if stopping:
                break
    if not lone:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
