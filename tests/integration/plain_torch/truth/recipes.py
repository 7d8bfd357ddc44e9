"""What the trainings of the test of truth are made of: model, optimizer, schedule, precision and loader of any kind.

A recipe is a plain value. The training under Trainmedic and the plain one that it is compared with are both made from
it here, with calls of PyTorch alone. Not here: the two loops (``commanded``, ``plain_course``).
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.integration.plain_torch.own_optimizers import LocalNorms, OwnedMomentum

SAMPLES = 26
MODELS = ("plain", "batch_norm", "dropout", "tied", "transformer", "recurrent")
OPTIMIZERS = ("sgd", "adamw", "groups")
SCHEDULERS = ("none", "step", "cosine", "one_cycle", "lambda", "plateau", "own")
PRECISIONS = ("fp32", "bf16", "scaled", "scaled_off")
INDEXED = ("in_order", "shuffled", "own_generator", "sampler", "distributed", "batch_sampler")
"""Loaders whose order of samples is known epoch by epoch."""
READ_ON = ("iterable", "shuffling", "buffered_stream", "stateful", "list")
"""Sources that a plain loop reads from their beginning on, epoch after epoch."""
OTHERS = ("function", "stream", "own_draws", "liar")
LOADERS = (*INDEXED, *READ_ON, *OTHERS)


@dataclass(frozen=True)
class Recipe:
    """One training. ``seed`` makes its parameters and all of its random numbers."""

    model: str = "dropout"
    optimizer: str = "adamw"
    scheduler: str = "one_cycle"
    precision: str = "fp32"
    loader: str = "shuffled"
    workers: int = 0
    drop_last: bool = False
    augments: bool = True
    """Whether a sample is made with random numbers each time that it is read."""
    ahead: bool = False
    """Whether the loop takes each batch during the step before."""
    within: bool = False
    """Whether the loop takes all batches of a step within it, and says nothing of that to Trainmedic."""
    own_calls: bool = False
    """Whether the loop steps its optimizer itself, in place of ``step.update()``."""
    accumulation: int = 1
    buffers: bool = False
    """Whether the loop trains on batches of before as well, from a buffer between the loader and the loss."""
    ema: bool = False
    every: int = 4
    """Steps between two checkpoints on the disk."""
    memory: str = "none"
    wrapped: str = "none"
    """With several ranks, ``ddp`` or ``fsdp``."""
    batch: int = 4
    seed: int = 1


@dataclass(frozen=True)
class Place:
    """A rank, and how a model is wrapped there."""

    rank: int = 0
    ranks: int = 1
    wrap: Callable[[Recipe, nn.Module], Any] = lambda _, model: model


ALONE = Place()
Batch = tuple[torch.Tensor, torch.Tensor]


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Samples by their number; with ``augments`` each looks different whenever it is read."""

    def __init__(self, augments: bool) -> None:
        self.augments = augments

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return sample(index, self.augments), index


class Lines(IterableDataset[tuple[torch.Tensor, int]]):
    """The same in a row, or in an order that is drawn when an epoch begins."""

    def __init__(self, augments: bool, shuffles: bool) -> None:
        self.augments, self.shuffles = augments, shuffles

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        order = torch.randperm(SAMPLES).tolist() if self.shuffles else list(range(SAMPLES))
        return ((sample(index, self.augments), index) for index in order)


class Stream(Lines):
    """The same, shuffled through a buffer that is filled from the row, as streams of large data are."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        held: list[tuple[torch.Tensor, int]] = []
        for each in super().__iter__():
            held.append(each)
            if len(held) == 6:
                yield held.pop(int(torch.randint(len(held), ())))
        while held:
            yield held.pop(int(torch.randint(len(held), ())))


class Liar:
    """It says that it keeps its position, and goes on wherever it is told to go."""

    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.drawn += 1
            yield stack([self.drawn, self.drawn + 1], False)

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Any) -> None:
        pass


def sample(index: int, augments: bool) -> torch.Tensor:
    plain = torch.arange(4, dtype=torch.float32) * 0.3 + index * 0.05
    return plain + 0.1 * torch.randn(4) + 0.1 * random.random() if augments else plain


def stack(indices: Iterable[int], augments: bool) -> Batch:
    """A batch of these samples, as a loader makes it."""
    numbers = list(indices)
    return torch.stack([sample(index, augments) for index in numbers]), torch.tensor(numbers)


def draw(recipe: Recipe) -> Batch:
    """A batch of samples that are drawn at random."""
    return stack(torch.randint(SAMPLES, (recipe.batch,)).tolist(), recipe.augments)


def make_loader(recipe: Recipe, place: Place = ALONE) -> Any:
    """The loader of a training; None where the loop draws its own batches."""
    data, size = Samples(recipe.augments), recipe.batch
    options: dict[str, Any] = {"num_workers": recipe.workers, "drop_last": recipe.drop_last}
    makers: dict[str, Callable[[], Any]] = {
        "in_order": lambda: DataLoader(data, size, **options),
        "shuffled": lambda: DataLoader(data, size, shuffle=True, **options),
        "own_generator": lambda: DataLoader(data, size, sampler=own_sampler(recipe), **options),
        "sampler": lambda: DataLoader(data, size, sampler=SubsetRandomSampler(range(3, SAMPLES)), **options),
        "distributed": lambda: DataLoader(data, size, sampler=distributed(recipe, place), **options),
        "batch_sampler": lambda: DataLoader(
            data,
            batch_sampler=BatchesOfTwoSizes(BatchSampler(RandomSampler(data), size, recipe.drop_last)),
            num_workers=recipe.workers,
        ),
        "iterable": lambda: DataLoader(Lines(recipe.augments, False), size, drop_last=recipe.drop_last),
        "shuffling": lambda: DataLoader(Lines(recipe.augments, True), size, drop_last=recipe.drop_last),
        "buffered_stream": lambda: StatefulDataLoader(Stream(recipe.augments, False), size, drop_last=recipe.drop_last),
        "stateful": lambda: StatefulDataLoader(data, size, shuffle=True, drop_last=recipe.drop_last),
        "list": lambda: [stack(range(start, start + size), False) for start in range(20)],
        "function": lambda: lambda: draw(recipe),
        "stream": lambda: (stack([number, number + 1], False) for number in range(100_000)),
        "own_draws": lambda: None,
        "liar": Liar,
    }
    return makers[recipe.loader]()


def own_sampler(recipe: Recipe) -> Any:
    return RandomSampler(Samples(False), generator=torch.Generator().manual_seed(recipe.seed))


def distributed(recipe: Recipe, place: Place) -> Any:
    return DistributedSampler(Samples(False), place.ranks, place.rank, shuffle=True, seed=recipe.seed)


class BatchesOfTwoSizes:
    """A batch sampler of the user's own: every third batch of another one is cut in two."""

    def __init__(self, batches: Any) -> None:
        self.sampler = batches

    def __len__(self) -> int:
        return len(self.sampler) + (len(self.sampler) + 2) // 3

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(self.sampler):
            if number % 3 == 0:
                yield batch[:1]
                yield batch[1:] or batch[:1]
            else:
                yield batch


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.second.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(inputs)))))
        return found


class Recurrent(nn.Module):
    """It carries a hidden state from batch to batch, in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.hidden: torch.Tensor | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = torch.tanh(self.first(inputs))
        if self.hidden is not None:
            found = found + 0.5 * self.hidden
        self.hidden = found.detach().mean(0)
        last: torch.Tensor = self.last(found)
        return last


def make_model(recipe: Recipe) -> nn.Module:
    encoder = {"d_model": 4, "nhead": 2, "dim_feedforward": 8, "dropout": 0.1, "batch_first": True}
    makers: dict[str, Callable[[], nn.Module]] = {
        "plain": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)),
        "batch_norm": lambda: nn.Sequential(
            nn.Linear(4, 8), nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 1)
        ),
        "dropout": lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1)),
        "tied": Tied,
        "recurrent": Recurrent,
        "transformer": lambda: nn.Sequential(
            nn.Linear(4, 8),
            nn.Unflatten(1, (2, 4)),
            nn.TransformerEncoderLayer(**encoder),
            nn.Flatten(),
            nn.Linear(8, 1),
        ),
    }
    return makers[recipe.model]()


class Parts:
    """Model, optimizer and the rest of one training, made of a recipe with its random numbers."""

    def __init__(self, recipe: Recipe, place: Place = ALONE) -> None:
        torch.manual_seed(recipe.seed)
        random.seed(recipe.seed)
        self.recipe = recipe
        model = make_model(recipe)
        self.ema = None
        if recipe.ema:
            self.ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        self.plain = model
        self.model = place.wrap(recipe, model)
        if place.ranks > 1:  # each with dropout and augmentation of its own
            torch.manual_seed(100 * recipe.seed + place.rank)
            random.seed(100 * recipe.seed + place.rank)
        self.optimizer = _optimizer(recipe, list(self.model.parameters()))
        self.scheduler = _scheduler(recipe, self.optimizer)
        self.buffer: deque[torch.Tensor] = deque(maxlen=3)
        self.scaler = None
        if recipe.precision.startswith("scaled"):
            self.scaler = torch.amp.GradScaler(
                "cpu", init_scale=8.0, growth_interval=3, enabled=recipe.precision == "scaled"
            )

    def loss(self, batch: Batch) -> torch.Tensor:
        inputs, numbers = batch
        enabled = self.recipe.precision != "fp32"
        with torch.autocast("cpu", torch.bfloat16) if enabled else contextlib.nullcontext():
            outputs = self.model(inputs)
        target = 0.02 * numbers.float().mean()
        found: torch.Tensor = (outputs.float() - target).square().mean() + 0.5
        if self.recipe.buffers:
            found = found + sum(0.1 * (outputs.float().mean() - each).square() for each in self.buffer)
            self.buffer.append(outputs.detach().float().mean())
        return found

    def backward(self, loss: torch.Tensor, accumulation: int) -> None:
        loss = loss / accumulation if accumulation > 1 else loss
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def apply(self) -> None:
        """The optimizer's step, in a loop that makes its calls itself."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def advance(self, mean_loss: float) -> None:
        """What follows the optimizer's step."""
        if self.scheduler is not None and self.recipe.scheduler != "plateau":
            self.scheduler.step()
        if self.ema is not None:
            self.ema.update_parameters(self.plain)
        self.advance_by(mean_loss)

    def advance_by(self, mean_loss: float) -> None:
        """What ``step.update()`` leaves to the loop."""
        if self.recipe.scheduler == "plateau":
            self.scheduler.step(mean_loss)

    def set_own_rates(self, number: int, scaled: Callable[[float], float] = lambda rate: rate) -> None:
        """What a loop that sets its rates by itself does before update ``number``."""
        if self.recipe.scheduler == "own":
            for group in self.optimizer.param_groups:
                group["lr"] = scaled(0.02 * 0.97**number)

    @property
    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def fingerprints(self) -> dict[str, str]:
        """By name, of all that the training consists of but for its learning rates."""
        found: dict[str, Any] = dict(self.plain.state_dict())
        hidden = getattr(self.plain, "hidden", None)
        if self.recipe.model == "recurrent":
            found["hidden"] = hidden
        found.update({f"buffer.{number}": value for number, value in enumerate(self.buffer)})
        if isinstance(self.optimizer, LocalNorms):
            found["latest"] = self.optimizer.latest
        if self.ema is not None:
            found.update({f"ema.{name}": value for name, value in self.ema.state_dict().items()})
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            for name, value in self.optimizer.state.get(parameter, {}).items():
                found[f"moment.{number}.{name}"] = value
        found["betas"] = [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]
        if self.scaler is not None:
            found["scaler"] = self.scaler.state_dict()
        if self.scheduler is not None:
            held = self.scheduler.state_dict()
            found["schedule"] = [held.get(name) for name in ("last_epoch", "num_bad_epochs", "best")]
        found["random"] = torch.get_rng_state()
        found["random.python"] = random.getstate()
        return {name: _digest(value) for name, value in found.items()}


def _digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        raw = local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if local.numel() else b""
    else:
        raw = repr(value).encode()
    return hashlib.blake2b(raw, digest_size=8).hexdigest()


def digest_of(batch: Batch) -> str:
    return _digest(batch[0]) + _digest(batch[1])


def _optimizer(recipe: Recipe, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    if recipe.optimizer == "owned":  # each rank has the momentum of some parameters only
        return OwnedMomentum(parameters)
    if recipe.optimizer == "local_norms":  # the same of what FSDP has spread, in plain tensors
        return LocalNorms(parameters)
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=0.01)
    return torch.optim.AdamW([{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:], "weight_decay": 0.0}])


def _scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer) -> Any:
    makers: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "own": lambda: None,
        "step": lambda: lr_scheduler.StepLR(optimizer, 3, 0.7),
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 40),
        "one_cycle": lambda: lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=2000),
        "lambda": lambda: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.1 * step)),
        "plateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2),
    }
    return makers[recipe.scheduler]()
