"""A training around a DeepSpeed engine, as a program for tests under torchrun: ``deepspeed_training.py STAGE TYPE``.

``STAGE`` is that of ZeRO, ``TYPE`` the type of the weights: fp32 or bf16. With stage 0 the optimizer keeps the momentum
of each parameter on one rank alone, as Muon does. It trains until it is told to stop, then a
few times more; of each, every rank writes what it has come to as ``<name>-<rank>.pt``. Not here: what is ordered
meanwhile, and what is expected.

- ``ordered``: batches of four, one of which makes a step; with whatever the test orders.
- ``calm``: anew, to the step that the first one came to, with nothing ordered, and with batches of two from the
  beginning, two of which make a step. ``further``: the same, some steps later.
- ``resumed``: as if the first one had been started again, to that later step.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found]
import deepspeed.ops  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from deepspeed.utils import (  # type: ignore[import-not-found]
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
)
from torch import nn
from torch.utils.data import Dataset

import trainmedic
import trainmedic.deepspeed
from tests.integration.plain_torch.own_optimizers import OwnedMomentum

FURTHER = 12  # steps
MOMENTS = ("exp_avg", "exp_avg_sq")


class Augmented(Dataset[torch.Tensor]):
    """Samples that look different each time they are drawn, also by a generator of the data set's own."""

    def __init__(self, rank: int) -> None:
        self.noise = random.Random(200 + rank)

    def __len__(self) -> int:
        return 104

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4) + index / 104 + random.random() + 0.1 * self.noise.random()


class Carrying(nn.Module):
    """A model with state that no ``state_dict`` holds, or each rank has its own of: a hidden state from batch to
    batch, a buffer that is not persistent, and the largest value seen, as layers in 8 bits keep it to scale by."""

    mean: torch.Tensor

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.3), norm, nn.Linear(9, 1))
        self.hidden: torch.Tensor | None = None
        self.largest = torch.zeros(())
        self.register_buffer("mean", torch.zeros(()), persistent=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(batch)
        found = found / (1 + self.largest) + 0.1 * self.mean
        if self.hidden is not None:
            found = found + 0.5 * self.hidden
        self.hidden = found.detach().mean(0)
        self.mean.mul_(0.9).add_(0.1 * found.detach().float().mean())
        self.largest = torch.maximum(self.largest * 0.95, found.detach().float().abs().max())
        return found

    def get_extra_state(self) -> torch.Tensor:
        return self.largest

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.largest = state.clone()


def configuration(stage: int, weights: str, micro_batch: int, accumulation: int) -> dict[str, Any]:
    """The engine's, with a scheduler of DeepSpeed's own."""
    optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}} if stage else {}
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        **optimizer,
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.01, "total_num_steps": 100_000},
        },
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": weights == "bf16"},
        "steps_per_print": 1_000_000,
    }


class Training:
    """One training from its beginning, in a directory of its own unless that of another is named."""

    def __init__(
        self, medic: trainmedic.Medic, stage: int, weights: str, directory: str, batch: int, accumulation: int
    ) -> None:
        torch.manual_seed(3)
        rank = dist.get_rank()
        # Batch normalisation has buffers, each rank its own, and is not to be had on a CPU with weights of 16 bits.
        norm = nn.LayerNorm(9) if weights == "bf16" else nn.BatchNorm1d(9)
        model = Carrying(norm)
        self.engine, _, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            optimizer=None if stage else OwnedMomentum(model.parameters()),
            training_data=Augmented(rank),
            config=configuration(stage, weights, batch, accumulation),
        )
        self.engine.training_dataloader.num_local_io_workers = 0
        self.type = torch.bfloat16 if weights == "bf16" else torch.float32
        torch.manual_seed(100 + rank)  # dropout and augmentation of its own
        random.seed(100 + rank)
        self.losses: dict[int, float] = {}
        self.seen = {"losses": [0.0]}  # the loop's own average, which its loss depends on
        self.run = trainmedic.deepspeed.attach(
            medic,
            self.engine,
            checkpoints=directory,
            checkpoint_every=10,
            keep=None,
            seed=5,
            rollbacks=None,
            also={"seen": self.seen},
        )

    def train(self, steps: int | None = None) -> None:
        losses: list[float] = []
        for batch in self.run.batches(steps=steps):
            with self.run.step() as step:
                assert step.is_update == self.engine.is_gradient_accumulation_boundary()
                # A mean would be that of its own batch, and two batches are not one of twice the size.
                loss = self.engine(batch.to(self.type)).float().square().mean() + 0.1
                loss = loss * (1 + 0.01 * self.seen["losses"][-1])
                self.seen["losses"] = [*self.seen["losses"][-3:], 0.9 * self.seen["losses"][-1] + 0.1 * loss.item()]
                self.engine.backward(loss)
                self.engine.step()
                step.report(loss=loss, grad_norm=self.engine.get_global_grad_norm())
                losses.append(loss.item())
                if step.is_update:
                    assert step.number == self.engine.global_steps
                    self.losses[step.number], losses = sum(losses), []
            if not self.run.training.batches_done:
                Path(f"at-{dist.get_rank()}").write_text(str(self.run.global_step))
                time.sleep(0.002 if steps is None else 0)

    def write(self, name: str) -> None:
        held = {
            "step": self.run.global_step,
            "micro": self.engine.train_micro_batch_size_per_gpu(),
            "accumulation": self.engine.gradient_accumulation_steps(),
            "rates": [group["lr"] for group in self.engine.optimizer.param_groups],
            "losses": self.losses,
            "random": torch.get_rng_state(),
            "tensors": _tensors(self.engine),
            "epoch": self.run.epoch,
            "seen": self.seen,
        }
        file = Path(f"{name}-{dist.get_rank()}.pt")
        torch.save(held, file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)


def _tensors(engine: Any) -> list[torch.Tensor]:
    """All weights and the optimizer's state, of this rank or put together of what the ranks hold, and its buffers."""
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        computed = [parameter.detach().clone() for parameter in parameters]
    if engine.zero_optimization_stage() == 3:  # whose partitions end with memory that nobody has written
        trained = [safe_get_full_fp32_param(parameter) for parameter in parameters]
        states = [safe_get_full_optimizer_state(parameter, name) for parameter in parameters for name in MOMENTS]
    else:
        optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        trained = [parameter.detach() for parameter in stepped]
        held = [optimizer.state.get(parameter, {}) for parameter in stepped]
        states = [state[name] for state in held for name in (*MOMENTS, "momentum_buffer") if name in state]
    carried = (engine.module.hidden, engine.module.largest)
    return [tensor.clone() for tensor in (*computed, *trained, *engine.module.buffers(), *carried, *states)]


def main(stage: int, weights: str) -> None:
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__.clear()  # else it calls a compiler, for collectives that gloo has as well
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    rank = dist.get_rank()
    with trainmedic.connect(job="llm-1") as medic, Path(f"rank-{rank}.jsonl").open("a", buffering=1) as log:
        log.write(json.dumps({"pid": os.getpid()}) + "\n")
        ordered = Training(medic, stage, weights, "ordered", 4, 1)
        ordered.run.resume()
        ordered.train()
        ordered.write("ordered")
        ordered.run.close()
        calm = Training(medic, stage, weights, "calm", 2, 2)
        calm.train(ordered.run.global_step)
        calm.write("calm")
        calm.train(ordered.run.global_step + FURTHER)
        calm.write("further")
        calm.run.close()
        resumed = Training(medic, stage, weights, "ordered", 4, 1)
        resumed.run.resume()
        resumed.train(ordered.run.global_step + FURTHER)
        resumed.write("resumed")
        resumed.run.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
