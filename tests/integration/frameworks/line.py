"""A line that Lightning learns from a few points, with its Trainer, and a script of what happens at which step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points of a line with noise; ``seen`` keeps which were read."""

    def __init__(self, count: int = 120) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 4, generator=generator)
        self.y = self.x.sum(1, keepdim=True) + torch.randn(count, 1, generator=generator)
        self.seen: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.append(number)
        return self.x[number], self.y[number]


class Failures:
    """Whether a step fails, once for each in ``steps``. It is a function, so that no restart puts it back."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.left = list(steps)

    def __call__(self, step: int) -> bool:
        if self.left[:1] != [step]:
            return False
        del self.left[0]
        return True


class Line(pl.LightningModule):
    """It has dropout, so that the random state matters."""

    def __init__(self, fails_at: tuple[int, ...] = (), constant: bool = False) -> None:
        super().__init__()
        self.constant = constant
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        self.fails_at = Failures(fails_at)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.fails_at(self.global_step + 1):
            raise RuntimeError("CUDA out of memory")
        x, y = batch
        loss: torch.Tensor = torch.nn.functional.mse_loss(self.layers(x), y)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1.0 if self.constant else 1 / (1 + step / 20)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Script(pl.Callback):
    """Does something when a step ends, once for each entry; keeps the rate and the loss of each step."""

    def __init__(self, **acts: Callable[[Any], None]) -> None:
        self.acts = {int(name.removeprefix("at_")): act for name, act in acts.items()}
        self.steps: list[int] = []
        self.rates: list[float] = []
        self.losses: dict[int, float] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if self.steps and trainer.global_step == self.steps[-1]:
            return
        self.steps.append(trainer.global_step)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.losses[trainer.global_step] = outputs["loss"].item()
        act = self.acts.pop(trainer.global_step, None)
        if act is not None:
            act(trainer)


def make_trainer(directory: Path, *callbacks: Any, **options: Any) -> pl.Trainer:
    """A Trainer with epochs of 30 steps and a checkpoint every 5."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    keep = ModelCheckpoint(dirpath=directory / "out", every_n_train_steps=5, save_top_k=-1)
    arguments: dict[str, Any] = {
        "max_steps": 40,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **options,
    }
    return pl.Trainer(callbacks=[*callbacks, keep], default_root_dir=directory, **arguments)


def loader(points: Points | None = None) -> DataLoader[Any]:
    return DataLoader(points or Points(), batch_size=4, shuffle=True)
