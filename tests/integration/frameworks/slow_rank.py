"""A Trainer of Hugging Face and then one of Lightning, each as one of several ranks whose last has slow data: a program
for torchrun.

Of each, rank 0 writes the job's metrics after 30 steps to ``<job>.metrics`` in the current directory.
"""

from __future__ import annotations

import os
import time
import urllib.request
from pathlib import Path
from typing import Any

import trainmedic.lightning
from tests.integration.frameworks.hf import Windows
from tests.integration.frameworks.hf import make_trainer as make_huggingface_trainer
from tests.integration.frameworks.line import Line, Points, loader
from tests.integration.frameworks.line import make_trainer as make_lightning_trainer
from trainmedic import huggingface

STEPS = 30
IS_SLOW = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
DELAY = 0.05 if IS_SLOW else 0.005  # seconds for each of four samples


class SlowWindows(Windows):
    def __getitem__(self, number: int) -> dict[str, Any]:
        time.sleep(DELAY)
        return super().__getitem__(number)


class SlowPoints(Points):
    def __getitem__(self, number: int) -> Any:
        time.sleep(DELAY)
        return super().__getitem__(number)


def write_metrics(medic: trainmedic.Medic) -> None:
    if medic.metrics_port is not None:
        with urllib.request.urlopen(f"http://127.0.0.1:{medic.metrics_port}/metrics", timeout=60) as reply:
            Path(f"{medic.job}.metrics").write_bytes(reply.read())


def main() -> None:
    with trainmedic.connect("huggingface", metrics_port=0) as medic:
        trainer = make_huggingface_trainer(
            Path("huggingface"),
            max_steps=STEPS,
            train_dataset=SlowWindows(),
            eval_dataset=Windows(8),
            eval_strategy="steps",
            eval_steps=20,
            ddp_find_unused_parameters=False,
        )
        huggingface.train(trainer, medic=medic)
        write_metrics(medic)
    with trainmedic.connect("lightning", metrics_port=0) as medic:
        fit = make_lightning_trainer(
            Path("lightning").absolute(), max_steps=STEPS, strategy="ddp", devices=int(os.environ["WORLD_SIZE"])
        )
        trainmedic.lightning.fit(fit, Line(constant=True), loader(SlowPoints(1000)), medic=medic)
        write_metrics(medic)


main()
