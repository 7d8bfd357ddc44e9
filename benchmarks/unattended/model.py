"""A small causal transformer over characters, and its batches."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from benchmarks.unattended.corpus import Corpus

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 48, 64, 4, 2, 16
_VALIDATION_ROWS = 2048


class CharModel(nn.Module):
    """Model of the next character's logits."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.characters(text) + self.positions, mask=self.mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits

    def loss(self, text: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self(text).flatten(0, 1), labels.flatten())


class Rows(Dataset[tuple[int, torch.Tensor]]):
    """Endless rows: row n is a piece of the text from a place that depends on n alone."""

    def __init__(self, text: bytes, count: int, seed: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._count = count
        self._seed = seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        start = random.Random(self._seed * 1_000_003 + number).randrange(len(self._text) - CONTEXT - 1)
        return number, self._text[start : start + CONTEXT + 1]


def validation_loss(model: CharModel, corpus: Corpus) -> float:
    """Return the loss over always the same two thousand rows of held-out text."""
    rows = Rows(corpus.validation, _VALIDATION_ROWS, seed=7)
    was_training = model.training
    model.eval()
    total = 0.0
    with torch.no_grad():
        for first in range(0, _VALIDATION_ROWS, 128):
            batch = torch.stack([rows[number][1] for number in range(first, first + 128)])
            total += float(model.loss(batch[:, :-1], batch[:, 1:])) * len(batch)
    model.train(was_training)
    return total / _VALIDATION_ROWS
