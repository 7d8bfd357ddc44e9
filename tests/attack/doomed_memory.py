"""A training whose state says of which step it is, to be killed at any moment: ``doomed_memory.py STEPS``.

Every number of the state that belongs to step n is n. What it has resumed from, and whether all of that was of one
step, is a line in ``resumed.jsonl``. Its copies are made as often as can be, so that most kills fall into one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trainmedic
import trainmedic.torch

SIZE = 2_000_000


class Counter:
    """An optimizer of a kind: a step adds one to all that there is."""

    def __init__(self, model: nn.Module) -> None:
        self.param_groups = [{"params": list(model.parameters()), "lr": 0.1}]
        self.moments = torch.zeros(SIZE)
        self.extra: list[torch.Tensor] = []

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(1)
            for tensor in (self.moments, *self.extra):
                tensor.add_(1)

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments, "extra": list(self.extra)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments, self.extra = state["moments"], list(state["extra"])


def main(steps: int) -> None:
    torch.set_num_threads(1)
    model = nn.Linear(1000, 1000)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    counter = Counter(model)
    with trainmedic.connect(job="doomed", redis_url="redis://127.0.0.1:1/0", rank=0, world_size=1) as medic:
        run = trainmedic.torch.attach(
            medic,
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            also={"counter": counter},
            loader=torch.zeros(10_000, 1),
            checkpoints="saved",
            checkpoint_every=40,
            memory=trainmedic.torch.Memory(every=1, share=1e6, asynchronous=True),
        )
        step = run.resume()
        numbers = {
            float(value)
            for tensor in (*model.parameters(), counter.moments, *counter.extra)
            for value in (tensor.min(), tensor.max())
        }
        with Path("resumed.jsonl").open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), "step": step, "numbers": sorted(numbers)}) + "\n")
        for _ in run.batches(steps=steps):
            with run.step() as training_step:
                counter.step()
                if training_step.number % 25 == 0:  # the state grows
                    counter.extra.append(torch.full((SIZE // 20,), float(training_step.number)))
                training_step.report(loss=1.0)
            Path("at").write_text(str(run.global_step))
            time.sleep(0.003)
        run.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
