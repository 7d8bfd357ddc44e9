"""A Trainer of Hugging Face and then one of Lightning, each as one of several ranks: a program for torchrun.

Each trains until it is told to stop, as the job of its name. Every rank writes what it saw when a step ended, and
the end, to ``<job>-<rank>.jsonl`` in the current directory.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from transformers import TrainerCallback

import trainmedic.lightning
from tests.integration.frameworks.hf import make_trainer
from tests.integration.frameworks.line import Line, loader
from tests.integration.frameworks.line import make_trainer as make_lightning_trainer
from trainmedic import huggingface

STEP_SECONDS = 0.01
Write = Callable[..., None]


class Watch(TrainerCallback):
    def __init__(self, write: Write) -> None:
        self._write = write

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        time.sleep(STEP_SECONDS)
        self._write(step=state.global_step, rate=objects["optimizer"].param_groups[0]["lr"])


class LightningWatch(pl.Callback):
    def __init__(self, write: Write) -> None:
        self._write = write

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        time.sleep(STEP_SECONDS)
        self._write(step=trainer.global_step, rate=trainer.optimizers[0].param_groups[0]["lr"])


def writer(job: str) -> Write:
    path = Path(f"{job}-{os.environ['RANK']}.jsonl")

    def write(**line: Any) -> None:
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    return write


def train_huggingface() -> None:
    write = writer("huggingface")
    trainer = make_trainer(
        Path("huggingface"),
        Watch(write),
        max_steps=100_000,
        lr_scheduler_type="constant",
        ddp_find_unused_parameters=False,
    )
    ended = huggingface.train(trainer, job="huggingface").global_step
    write(ended=ended)


def train_lightning() -> None:
    write = writer("lightning")
    trainer = make_lightning_trainer(
        Path("lightning").absolute(),
        LightningWatch(write),
        max_steps=100_000,
        strategy="ddp",
        devices=int(os.environ["WORLD_SIZE"]),
    )
    trainmedic.lightning.fit(trainer, Line(constant=True), loader(), job="lightning")
    write(ended=trainer.global_step)


if __name__ == "__main__":
    train_huggingface()
    train_lightning()
    torch.distributed.destroy_process_group()
