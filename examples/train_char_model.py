"""Train a small character model on the CPU under Trainmedic.

``train`` contains everything that Trainmedic adds to a typical PyTorch loop: it attaches to the parts, yields the
batches, and gets a report of each step. Playbooks can then roll the run back, change its learning rate, pause it or
stop it.

    python examples/train_char_model.py --checkpoints /tmp/char-model --poison-at 600

``--poison-at`` damages the labels of some batches, so that the loss jumps. Needs torch and trainmedic.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import trainmedic
import trainmedic.torch

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 48, 64, 4, 2, 16


class CharModel(nn.Module):
    """Decoder-only transformer that returns the logits of each next character."""

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


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of the text. Rows of poisoned batches have random labels."""

    def __init__(self, text: str, poisoned: range) -> None:
        self.vocabulary = sorted(set(text))
        codes = {character: code for code, character in enumerate(self.vocabulary)}
        self.text = torch.tensor([codes[character] for character in text])
        self.poisoned = poisoned

    def __len__(self) -> int:
        return 1_000_000_000  # endless

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        dice = torch.Generator().manual_seed(number)
        start = int(torch.randint(len(self.text) - CONTEXT - 1, (), generator=dice))
        row = self.text[start : start + CONTEXT + 1]
        labels = row[1:]
        if number // BATCH in self.poisoned:
            labels = torch.randint(len(self.vocabulary), labels.shape, generator=dice)
        return row[:-1], labels


def train(medic: trainmedic.Medic, rows: Rows, options: argparse.Namespace) -> None:
    model = CharModel(len(rows.vocabulary))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    run = trainmedic.torch.attach(
        medic,
        model=model,
        optimizer=optimizer,
        loader=DataLoader(rows, batch_size=BATCH),
        checkpoints=options.checkpoints,
        checkpoint_every=options.checkpoint_every,
        keep=options.keep,
    )
    run.resume()
    for text, labels in run.batches(steps=options.steps):
        began = time.monotonic()
        with run.step() as step:
            loss = functional.cross_entropy(model(text).flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm before clipping
            optimizer.step()
            step.report(loss=loss, grad_norm=norm)
        if step.number % 10 == 0:
            rate = optimizer.param_groups[0]["lr"]
            print(f"step {step.number}: loss {loss:.2f}, learning rate {rate:g}", flush=True)
        time.sleep(max(0.0, options.pace - (time.monotonic() - began)))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--job", default="char-model", help="the name that alerts call this job by")
    parser.add_argument("--checkpoints", type=Path, required=True, help="directory for checkpoints")
    parser.add_argument("--text", type=Path, nargs="+", help="files to learn from (default: Python's json package)")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--keep", type=int, default=10, metavar="COUNT", help="how many checkpoints stay")
    parser.add_argument("--poison-at", type=int, metavar="BATCH", help="first batch with spoiled labels")
    parser.add_argument("--poison-batches", type=int, default=180, help="how many batches are spoiled")
    parser.add_argument("--pace", type=float, default=0.0, metavar="SECONDS", help="least time of a step")
    parser.add_argument("--metrics-port", type=int, default=9108)
    return parser.parse_args(argv)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    texts = options.text or sorted(Path(json.__file__).parent.glob("*.py"))
    poisoned = range(0)
    if options.poison_at is not None:
        poisoned = range(options.poison_at, options.poison_at + options.poison_batches)
    rows = Rows("".join(path.read_text() for path in texts), poisoned)
    with trainmedic.connect(job=options.job, metrics_port=options.metrics_port) as medic:
        train(medic, rows, options)


if __name__ == "__main__":
    main()
