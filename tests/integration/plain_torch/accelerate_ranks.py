"""A loop with Hugging Face Accelerate on several ranks, as a program for tests under torchrun.

For each way to prepare a loader it trains twice, once calmly and once with a rollback in between, and each rank
writes what came of both as ``<way>-<rank>.json``. Not here: what is expected.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import trainmedic
import trainmedic.torch
from trainmedic.job.parameters import Rollback

SAMPLES, BATCH = 53, 4
BACK_AT, BACK_TO, STEPS = 9, 4, 16

WAYS: dict[str, dict[str, Any]] = {
    "dealt": {},
    "split": {"split_batches": True},
    "uneven": {"even_batches": False},
    "seedable": {"use_seedable_sampler": True},
    "dispatched": {"dispatch_batches": True},
    "streamed": {},
}


class Streamed(IterableDataset[Any]):
    """Accelerate lets one rank read it, and deals out what that has read."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.full((4,), number / SAMPLES), torch.tensor(number)) for number in range(SAMPLES)])


class Training:
    def __init__(self, medic: trainmedic.Medic, way: str, directory: str, accumulation: int) -> None:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulation, dataloader_config=DataLoaderConfiguration(**WAYS[way])
        )
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))
        numbered = TensorDataset(torch.arange(SAMPLES).float().repeat(4, 1).T / SAMPLES, torch.arange(SAMPLES))
        loader = DataLoader(Streamed(), BATCH) if way == "streamed" else DataLoader(numbered, BATCH, shuffle=True)
        torch.manual_seed(100 + accelerator.process_index)  # dropout of its own, and so a seed of its own
        self.accelerator = accelerator
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.medic = medic
        self.seen: list[list[int]] = []
        self.run = trainmedic.torch.attach(
            medic,
            accelerator=accelerator,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loader=self.loader,
            checkpoints=directory,
            checkpoint_every=BACK_TO,
            keep=None,
        )

    def train(self, back: Rollback | None = None) -> dict[str, Any]:
        told: dict[str, Any] = {}
        for rows, numbers in self.run.batches(steps=STEPS):
            self.seen.append(numbers.tolist())
            with self.run.step() as step, self.accelerator.accumulate(self.model):
                loss = self.model(rows).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                step.report(loss=loss)
            if back is not None and self.run.global_step == BACK_AT:
                told = dict(self.run._restore.roll_back(back, self.medic.group("back")))
                told["seen_before"] = len(self.seen)
                back = None
        state = [tensor.tolist() for tensor in self.model.parameters()]
        samples = self.run.training.batch_source
        assert samples is not None
        return {
            **told,
            "seen": self.seen,
            "state": state,
            "rate": self.optimizer.param_groups[0]["lr"],
            "epoch": self.run.epoch,
            "samples": samples.samples_per_batch,
        }


def main() -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    with trainmedic.connect(job="llm-1") as medic:
        for way in sys.argv[1:]:
            found = {}
            for name, back in (
                ("calm", None),
                ("repeated", Rollback(step=BACK_TO)),
                ("skipped", Rollback(step=BACK_TO, skip_batches=3)),
            ):
                training = Training(medic, way, f"{way}-{name}", 2 if way in ("dealt", "dispatched") else 1)
                found[name] = training.train(back)
                training.run.close()
            Path(f"{way}-{accelerator.process_index}.json").write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main()
