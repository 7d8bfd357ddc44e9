"""A small character model in PyTorch, protected by `trainmedic.torch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import trainmedic
import trainmedic.torch
from trainmedic_server.demo.faults import FaultKind
from trainmedic_server.demo.training_text import SPOILED_BATCHES, Explosion, FaultFile, StepPace, training_text

_CONTEXT, _WIDTH, _HIDDEN, _BATCH = 12, 16, 64, 64
_LEARNING_RATE = 3e-3
_STEPS = 1_000_000
_CHECKPOINT_EVERY = 40


class _Characters(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, _WIDTH)
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(_CONTEXT * _WIDTH, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, vocabulary)
        )

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(self.characters(context))
        return logits


class _Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sample n is always the same. Samples of spoiled batches have random labels."""

    def __init__(self, source: str, faults: FaultFile) -> None:
        self.vocabulary = sorted(set(source))
        codes = {character: code for code, character in enumerate(self.vocabulary)}
        self._codes = torch.tensor([codes[character] for character in source])
        self._faults = faults
        self._spoiled = range(0)
        self.explosion = Explosion()

    def __len__(self) -> int:
        return _STEPS * _BATCH

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch = number // _BATCH
        if number % _BATCH == 0:
            self._look_for_faults(batch)
        dice = torch.Generator().manual_seed(number)
        start = int(torch.randint(len(self._codes) - _CONTEXT - 1, (), generator=dice))
        label = self._codes[start + _CONTEXT]
        if batch in self._spoiled:
            label = torch.randint(len(self.vocabulary), (), generator=dice)
        return self._codes[start : start + _CONTEXT], label

    def _look_for_faults(self, batch: int) -> None:
        match self._faults.take():
            case FaultKind.DATA:
                self._spoiled = range(batch, batch + SPOILED_BATCHES)
            case FaultKind.GRADIENTS:
                self.explosion.begin()


def train(medic: trainmedic.Medic, directory: Path, faults: FaultFile) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    samples = _Samples(training_text(), faults)
    model = _Characters(len(samples.vocabulary))
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    loader: DataLoader[Any] = DataLoader(samples, batch_size=_BATCH)
    run = trainmedic.torch.attach(
        medic,
        model=model,
        optimizer=optimizer,
        loader=loader,
        checkpoints=directory,
        checkpoint_every=_CHECKPOINT_EVERY,
        keep=10,
    )
    run.resume()
    pace = StepPace()
    for context, labels in run.batches(steps=_STEPS):
        with run.step() as step:
            loss = functional.cross_entropy(model(context), labels)
            optimizer.zero_grad()
            (loss * samples.explosion.factor()).backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm before clipping
            optimizer.step()
            step.report(loss=loss, grad_norm=norm)
        pace.wait()
