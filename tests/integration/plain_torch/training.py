"""A small training with everything that makes a rollback hard: dropout, augmentation, shuffling, a schedule, EMA.

Here: the training, and ordering commands at given steps of it. Not here: what is expected of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import DataLoader, Dataset

import trainmedic
import trainmedic.torch
from tests.support.command_sender import Commander
from trainmedic.wire.envelope import Reply

SAMPLES, BATCH = 50, 4

Act = Callable[[], Any]


class Augmented(Dataset[tuple[torch.Tensor, int]]):
    """Samples that look different each time they are drawn, by Python's, NumPy's and PyTorch's numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(4) + index / SAMPLES + random.random(), index


class Training:
    """``losses`` by step, as they last were; ``seen`` the samples of every batch, in order."""

    def __init__(
        self,
        commander: Commander,
        medic: trainmedic.Medic,
        directory: Path,
        workers: int = 0,
        loader: Any = None,
        seed: int = 3,
        scheduler: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        random.seed(seed)
        self.commander = commander
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        make = scheduler or (lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=1000))
        self.scheduler = make(self.optimizer)
        self.ema = swa_utils.AveragedModel(self.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        self.losses: dict[int, float] = {}
        self.seen: list[list[int]] = []
        self.sent: list[str] = []
        if loader is None:
            loader = DataLoader(Augmented(), BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
        settings = {"checkpoints": directory, "checkpoint_every": 10, "keep": None, **options}
        self.run = trainmedic.torch.attach(
            medic,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            ema=self.ema,
            loader=loader,
            **settings,
        )

    def train(
        self,
        steps: int | None = None,
        at: Mapping[int, Act | Sequence[Act]] | None = None,
        at_batch: Mapping[int, Act] | None = None,
    ) -> None:
        """Until so many steps are done. ``at`` says what happens during which steps, once each; ``at_batch`` during the
        step of which batch, counted as they come, those that come again as well."""
        waiting = dict(at or {})
        for batch, indices in self.run.batches(steps=steps):
            self.seen.append(indices.tolist())
            with self.run.step() as step:
                loss = (self.model(batch) ** 2).mean() + 0.01 * indices.float().mean() * self.model[0].weight.mean()
                step.backward(loss)
                norm = step.update(max_norm=1.0)
                step.report(loss=loss, grad_norm=norm)
                self.losses[step.number] = loss.item()
                acts = waiting.pop(step.number, ()) if step.is_update else ()
                for act in (acts,) if callable(acts) else acts:
                    act()
                if at_batch and len(self.seen) in at_batch:
                    at_batch[len(self.seen)]()

    def order(self, action: str, undo_of: str | None = None, **params: Any) -> Act:
        """An act that sends the command, and returns once it waits for the step's end."""

        def act() -> None:
            medic = self.run.training.medic
            self.sent.append(self.commander.send_and_wait(medic, action, undo_of=undo_of, **params))

        return act

    def undo(self, number: int, action: str, **params: Any) -> Act:
        """The same for taking back the command that was sent as number so and so."""
        return lambda: self.order(action, undo_of=self.sent[number], **params)()

    def replies(self) -> list[Reply]:
        return [self.commander.final(one) for one in self.sent]

    def outputs(self) -> list[Mapping[str, Any]]:
        """Of the commands, which were all applied."""
        replies = self.replies()
        assert [reply.status for reply in replies] == ["applied"] * len(replies), replies
        return [reply.output for reply in replies]

    def state(self) -> list[torch.Tensor]:
        """All numbers that the training consists of."""
        found = [*self.model.state_dict().values(), *self.ema.state_dict().values()]
        for held in self.optimizer.state_dict()["state"].values():
            found.extend(held.values())
        return [torch.as_tensor(one).clone() for one in found]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """To the bit."""
    return len(one) == len(other) and all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
