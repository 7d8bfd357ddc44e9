"""A Lightning Trainer that starts its ranks itself: a program.

It trains twice, as the jobs ``plain`` and ``repaired``. Every rank writes the batches that it trained on and the loss
of each step to ``<job>-<rank>.jsonl`` in the current directory. Once at each of the steps in `ROLLBACKS`, rank 0 of the
job ``repaired`` orders a rollback, and writes its answer to ``answers.jsonl``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

import trainmedic.lightning
from tests.integration.frameworks.line import Line, loader, make_trainer
from tests.support.command_sender import Commander

EPOCH = 14  # batches that each of two ranks trains on; its loader has one more
ROLLBACKS: dict[int, dict[str, Any]] = {5: {}, 22: {"skip_batches": 4}}
STEPS = 60


class Watch(pl.Callback):
    def __init__(self, job: str, url: str) -> None:
        self.job = job
        self.url = url
        self.left = dict(ROLLBACKS) if job == "repaired" else {}
        self.commander: Commander | None = None
        self.waits_for = ""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        torch.manual_seed(trainer.global_rank)  # each rank has a dropout of its own

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        with Path(f"{self.job}-{trainer.global_rank}.jsonl").open("a") as file:
            line = {"step": trainer.global_step, "batch": batch[1].flatten().tolist(), "loss": outputs["loss"].item()}
            file.write(json.dumps(line) + "\n")
        if trainer.global_rank == 0 and self.job == "repaired":
            self.order(trainer.global_step)

    def order(self, step: int) -> None:
        """Training stays where it is until the command has arrived; then it goes on to where the ranks take it."""
        time.sleep(0.04)
        if self.commander is None:
            self.commander = Commander(self.url, self.job)
        if step in self.left:
            self.waits_for = self.commander.send("job.rollback", 120.0, **self.left.pop(step))
        final = [reply for reply in self.commander.replies(self.waits_for) if reply.is_final]
        if len(final) == 2:
            with Path("answers.jsonl").open("a") as file:
                file.write(json.dumps([[reply.status, reply.output] for reply in final]) + "\n")
            self.waits_for = ""


if __name__ == "__main__":
    for job in ("plain", "repaired"):
        trainer = make_trainer(
            Path(job).absolute(),
            Watch(job, sys.argv[2]),
            max_steps=STEPS,
            strategy=sys.argv[1],
            devices=2,
            accumulate_grad_batches=2,
            limit_train_batches=EPOCH,
        )
        trainmedic.lightning.fit(trainer, Line(), loader(), job=job, connection={"redis_url": sys.argv[2]})
