"""Scripts as popular repositories have them: what follows a rollback is what a training without one has.

In the style of diffusers' LoRA scripts (Accelerate, noise of the loop, an EMA of parameters), of timm (mixup with
NumPy's random numbers, an EMA model, a schedule that is no PyTorch one) and of word-level language models (a hidden
state that goes from batch to batch, a rate that the loop sets).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import trainmedic
import trainmedic.torch
from tests.support.command_sender import Sent

BACK, LEFT, STEPS = 10, 31, 60
SETTINGS = {"checkpoint_every": 10, "keep": None}


class Course:
    """The losses of all batches in the order in which they came, and what to do after which of them."""

    def __init__(self, act: Any = None, at: int = 0) -> None:
        self.losses: list[float] = []
        self.act, self.at = act, at

    def note(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.item())
        if self.act is not None and len(self.losses) == self.at:
            self.act(None)


class Adapter(nn.Module):
    """A frozen layer with a low-rank one beside it, which begins with zeros."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(0.1)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.base(inputs) + self.up(self.down(self.dropout(inputs)))


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.times, self.first, self.last = nn.Embedding(100, 16), nn.Linear(64, 16), nn.Linear(16, 64)

    def forward(self, noisy: torch.Tensor, times: torch.Tensor) -> Any:
        return self.last(torch.tanh(self.first(noisy) + self.times(times)))


class ShadowParameters:
    """An average of parameters alone, with a decay that grows by its own count."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.shadow = [each.detach().clone() for each in parameters]
        self.steps = 0

    @torch.no_grad()
    def step(self, parameters: list[nn.Parameter]) -> None:
        self.steps += 1
        part = 1 - min(0.999, (1 + self.steps) / (10 + self.steps))
        for average, parameter in zip(self.shadow, parameters, strict=True):
            average.sub_(part * (average - parameter))

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.shadow = state["steps"], [each.clone() for each in state["shadow"]]


def train_diffusion(medic: trainmedic.Medic, directory: Path, course: Course) -> list[torch.Tensor]:
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model: Any = Denoiser().requires_grad_(False)
    model.first, model.last = Adapter(model.first), Adapter(model.last)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ema = ShadowParameters(trained)
    optimizer: Any = torch.optim.AdamW(trained, lr=1e-2)
    rates: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    loader: Any = DataLoader(TensorDataset(torch.randn(64, 64)), 4, shuffle=True)
    model, optimizer, loader, rates = accelerator.prepare(model, optimizer, loader, rates)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)
    parts = {"model": model, "optimizer": optimizer, "scheduler": rates, "ema": ema, "loader": loader}
    with trainmedic.torch.attach(medic, accelerator=accelerator, checkpoints=directory, **parts, **SETTINGS) as run:
        for (clean,) in run.batches(steps=STEPS):
            with run.step() as step, accelerator.accumulate(model):
                noise = torch.randn_like(clean)
                times = torch.randint(0, 100, (len(clean),))
                noisy = kept[times].sqrt()[:, None] * clean + (1 - kept[times]).sqrt()[:, None] * noise
                loss = functional.mse_loss(model(noisy, times), noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                rates.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    ema.step(trained)
                step.report(loss=loss)
                course.note(loss)
    return [*trained, *ema.shadow]


class CosineByUpdates:
    """A schedule that is called with the number of updates, and writes the rates itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.step_update(0)

    def step_update(self, count: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (count + 1) / 20) * (1 + math.cos(math.pi * count / 400)) / 2

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "optimizer"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class AverageModel(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for average, value in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            average.copy_(0.9 * average + 0.1 * value)


def train_classifier(medic: trainmedic.Medic, directory: Path, course: Course) -> list[torch.Tensor]:
    body = (nn.Conv2d(3, 8, 8, 8), nn.BatchNorm2d(8), nn.GELU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(32, 10))
    model = nn.Sequential(*body)
    ema = AverageModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rates = CosineByUpdates(optimizer)
    data = TensorDataset(torch.randn(96, 3, 16, 16), torch.randint(10, (96,)))
    loader = DataLoader(data, 8, shuffle=True, drop_last=True)
    parts = {"model": model, "optimizer": optimizer, "scheduler": rates, "ema": ema, "loader": loader}
    with trainmedic.torch.attach(medic, checkpoints=directory, **parts, **SETTINGS) as run:
        for images, classes in run.batches(steps=STEPS):
            with run.step() as step:
                share = float(np.random.beta(0.8, 0.8))
                mixed = share * images + (1 - share) * images.flip(0)
                targets = functional.one_hot(classes, 10).float()
                with torch.autocast("cpu", torch.bfloat16):
                    outputs = model(mixed)
                loss = functional.cross_entropy(outputs.float(), share * targets + (1 - share) * targets.flip(0))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                ema.update(model)
                rates.step_update(step.number)
                step.report(loss=loss)
                course.note(loss)
    return [*model.state_dict().values(), *ema.state_dict().values()]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(50, 16), nn.LSTM(16, 32, 2, dropout=0.2), nn.Linear(32, 50)

    def forward(self, inputs: torch.Tensor, hidden: Any) -> Any:
        found, hidden = self.body(self.words(inputs), hidden)
        return self.head(found).flatten(0, 1), hidden


def train_words(medic: trainmedic.Medic, directory: Path, course: Course) -> list[torch.Tensor]:
    model = Words()
    text = torch.randint(50, (4, 1000)).t().contiguous()
    batches = [(text[start : start + 8], text[start + 1 : start + 9].flatten()) for start in range(0, 980, 8)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hidden: Any = None

    def set_hidden(value: Any) -> None:
        nonlocal hidden
        hidden = value

    parts = {"model": model, "optimizer": optimizer, "loader": batches}
    also = {"hidden": (lambda: hidden, set_hidden)}
    with trainmedic.torch.attach(medic, accumulation=2, also=also, checkpoints=directory, **parts, **SETTINGS) as run:
        for inputs, targets in run.batches(steps=STEPS):
            with run.step() as step:
                for group in optimizer.param_groups:
                    group["lr"] = step.learning_rate(0.99**step.number)
                hidden = None if hidden is None else tuple(each.detach() for each in hidden)
                outputs, hidden = model(inputs, hidden)
                loss = functional.cross_entropy(outputs, targets)
                (loss / 2).backward()
                if step.is_update:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
                    optimizer.step()
                    optimizer.zero_grad()
                step.report(loss=loss)
                course.note(loss)
    return [*model.state_dict().values(), *hidden]


@pytest.mark.parametrize(
    ("train", "batches"),
    [(train_diffusion, 2), (train_classifier, 1), (train_words, 2)],
    ids=["diffusion", "classifier", "words"],
)
def test_the_course_after_a_rollback_is_the_original_one(
    medic: trainmedic.Medic, sent: Sent, tmp_path: Path, train: Callable[..., list[torch.Tensor]], batches: int
) -> None:
    """The answer says so, and losses and weights equal those of a training without a rollback, to the bit."""

    def begin(name: str, course: Course) -> list[torch.Tensor]:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        np.random.seed(0)
        return train(medic, tmp_path / name, course)

    calm, repaired = Course(), Course(sent("job.rollback", step=BACK), LEFT * batches)
    expected, found = begin("calm", calm), begin("repaired", repaired)
    reply = sent.reply()
    assert reply.status == "applied", reply.output
    losses = reply.output["verified"]["losses"]
    assert (losses["compared"], losses["agreed"]) == (20, 20)
    assert repaired.losses[: LEFT * batches] == calm.losses[: LEFT * batches]
    assert repaired.losses[LEFT * batches :] == calm.losses[BACK * batches :]
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
