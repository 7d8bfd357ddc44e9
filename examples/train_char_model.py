"""Train a small character model on the CPU, with Trainmedic looking after it.

A plain PyTorch loop of the kind that people write: a causal transformer, AdamW, batches in a fixed order, a
checkpoint every so many steps. What Trainmedic adds are ``medic.report`` and the two handlers near the end:
going back to a checkpoint, and scaling the learning rate.

    python examples/train_char_model.py --checkpoints /tmp/char-model --poison-at 600

``--poison-at`` spoils the labels of some batches, so that the loss jumps and there is something to repair.
Needs torch and trainmedic. Notable events are printed as JSON, one a line.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import trainmedic

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 48, 64, 4, 2, 16


class CharModel(nn.Module):
    """A decoder-only transformer over characters; gives the logits of each next one."""

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


class Batches:
    """Batch number n, the same every time; those in ``poisoned`` have random labels."""

    def __init__(self, text: str, poisoned: range) -> None:
        self.vocabulary = sorted(set(text))
        codes = {character: code for code, character in enumerate(self.vocabulary)}
        self.text = torch.tensor([codes[character] for character in text])
        self.poisoned = poisoned

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        order = torch.Generator().manual_seed(number)
        starts = torch.randint(len(self.text) - CONTEXT - 1, (BATCH,), generator=order)
        rows = torch.stack([self.text[start : start + CONTEXT + 1] for start in starts])
        labels = rows[:, 1:]
        if number in self.poisoned:
            labels = torch.randint(len(self.vocabulary), labels.shape, generator=order)
        return rows[:, :-1], labels


class Training:
    """The model, its optimizer, and the place in the data; what a checkpoint holds."""

    def __init__(self, batches: Batches, learning_rate: float, directory: Path) -> None:
        torch.manual_seed(0)
        self.batches = batches
        self.model = CharModel(len(batches.vocabulary))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate)
        self.directory = directory
        self.step = 0
        self.next_batch = 0
        self.lr_scale = 1.0

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def train(self) -> tuple[float, float]:
        """One step on the next batch: the loss and the gradient norm."""
        text, labels = self.batches[self.next_batch]
        loss = functional.cross_entropy(self.model(text).flatten(0, 1), labels.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)  # the norm before clipping
        self.optimizer.step()
        self.step += 1
        self.next_batch += 1
        return loss.item(), norm.item()

    def save(self) -> Path:
        """A checkpoint. It gets its name when it is complete, so a half-written one is never loaded."""
        path = self.directory / f"step-{self.step:07d}.pt"
        state = {
            "step": self.step,
            "next_batch": self.next_batch,
            "lr_scale": self.lr_scale,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
        return path

    def load(self, path: Path) -> None:
        """Go back to a checkpoint. A learning rate that was scaled since then stays scaled."""
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] *= self.lr_scale / state["lr_scale"]
        self.step, self.next_batch = state["step"], state["next_batch"]

    def scale_lr(self, factor: float) -> None:
        self.lr_scale *= factor
        for group in self.optimizer.param_groups:
            group["lr"] *= factor

    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        return sorted(self.directory.glob("step-*.pt"), key=lambda path: path.stat().st_mtime)

    def checkpoint_for(self, params: Mapping[str, Any]) -> Path | None:
        """The newest checkpoint that a rollback with these parameters may go back to."""
        found = self.checkpoints()
        if "before" in params:
            moment = datetime.fromisoformat(params["before"]).timestamp()
            found = [path for path in found if path.stat().st_mtime < moment]
        if "step" in params or "steps_back" in params:
            latest = params.get("step", self.step - params.get("steps_back", 0))
            found = [path for path in found if step_of(path) <= latest]
        return found[-1] if found else None

    def roll_back(self, path: Path, skip_batches: int) -> None:
        """Go on from a checkpoint with later data, and put aside what was saved after it."""
        for newer in self.checkpoints()[self.checkpoints().index(path) + 1 :]:
            newer.rename(newer.with_suffix(".abandoned"))
        self.load(path)
        self.next_batch += skip_batches


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def carry_out(command: trainmedic.JobCommand, training: Training) -> None:
    """Do what Trainmedic asks for, and answer."""
    if command.action == "job.rollback":
        path = training.checkpoint_for(command.params)
        if path is None:
            command.rejected("there is no complete checkpoint to go back to")
            return
        left = training.step
        training.roll_back(path, command.params.get("skip_batches", 0))
        saved_at = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat()
        tell("rolled back", step=training.step, left_step=left, next_batch=training.next_batch, saved_at=saved_at)
        command.applied(step=training.step, left_step=left, checkpoint=path.name, saved_at=saved_at)
    elif command.action == "job.scale_lr":
        before = training.learning_rate
        training.scale_lr(command.params["factor"])
        tell("learning rate scaled", step=training.step, before=before, after=training.learning_rate)
        command.applied(before=before, after=training.learning_rate)
    elif command.action == "job.checkpoint":
        command.applied(checkpoint=training.save().name)
    else:
        command.unsupported()


def tell(event: str, **details: Any) -> None:
    print(json.dumps({"event": event, "time": time.time(), **details}), flush=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--job", default="char-model", help="the name that alerts call this job by")
    parser.add_argument("--checkpoints", type=Path, required=True, help="directory for checkpoints")
    parser.add_argument("--text", type=Path, nargs="+", help="files to learn from (default: Python's json package)")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--checkpoint-every", type=int, default=250, metavar="STEPS")
    parser.add_argument("--poison-at", type=int, metavar="BATCH", help="first batch with spoiled labels")
    parser.add_argument("--poison-batches", type=int, default=180, help="how many batches are spoiled")
    parser.add_argument("--pace", type=float, default=0.0, metavar="SECONDS", help="least time of a step")
    parser.add_argument("--metrics-port", type=int, default=9108)
    return parser.parse_args(argv)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    options.checkpoints.mkdir(parents=True, exist_ok=True)
    texts = options.text or sorted(Path(json.__file__).parent.glob("*.py"))
    poisoned = range(0)
    if options.poison_at is not None:
        poisoned = range(options.poison_at, options.poison_at + options.poison_batches)
    batches = Batches("".join(path.read_text() for path in texts), poisoned)
    training = Training(batches, options.learning_rate, options.checkpoints)
    if training.checkpoints():
        training.load(training.checkpoints()[-1])

    medic = trainmedic.connect(job=options.job, metrics_port=options.metrics_port)
    tell("started", step=training.step, learning_rate=training.learning_rate)
    while training.step < options.steps:
        began = time.monotonic()
        if training.next_batch == poisoned.start and poisoned:
            tell("poisoned", step=training.step)
        loss, norm = training.train()
        medic.report(step=training.step, loss=loss, grad_norm=norm, learning_rate=training.learning_rate, samples=BATCH)
        if training.step % options.checkpoint_every == 0:
            tell("saved", step=training.step, loss=loss, checkpoint=training.save().name)
        for command in medic.commands(training.step):
            carry_out(command, training)
        time.sleep(max(0.0, options.pace - (time.monotonic() - began)))
    tell("finished", step=training.step, loss=loss)
    medic.close()


if __name__ == "__main__":
    main()
