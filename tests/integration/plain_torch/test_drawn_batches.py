"""Loops that draw their own batches, in the manner of nanoGPT's ``train.py``; over a real Redis.

The loop here has that script's shape: a function that draws a batch, several batches a step without a word about it,
a rate set by hand, a gradient scaler that is switched off, and an evaluation in between that draws batches too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainmedic
import trainmedic.torch
from tests.integration.plain_torch.training import same
from tests.support.command_sender import Commander, Sent
from trainmedic.torch.restore import CANNOT_SKIP_IN_STREAM, FETCHED_AHEAD, UNKNOWN_STREAM
from trainmedic.wire.envelope import Reply

TEXT = torch.arange(5000) * 7919 % 61
ACCUMULATION, BATCH, CONTEXT = 3, 4, 8

Acts = Mapping[int, Callable[[], Any]]


class DrawingLoop:
    """``drawn`` are the beginnings of the batches that were trained on, in order."""

    def __init__(self, commander: Commander, medic: trainmedic.Medic, directory: Path, gives: str = "function") -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1337)
        self.commander = commander
        self.medic = medic
        self.gives = gives
        self.drawn: list[int] = []
        self.sent: list[str] = []
        self.model = nn.Sequential(nn.Embedding(61, 8), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * CONTEXT, 61))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler(enabled=False)
        self.generator = torch.Generator() if gives == "generator" else None
        self.place = torch.zeros((), dtype=torch.long)  # of a loader that counts
        loader: Any = None if gives == "nothing" else lambda: self.draw("train")
        if gives == "random iterator":
            loader = iter(loader, None)
        self.run = trainmedic.torch.attach(
            medic,
            model=self.model,
            optimizer=self.optimizer,
            scaler=self.scaler,
            loader=loader,
            checkpoints=directory,
            checkpoint_every=5,
            also={"place": self.place} if gives == "position" else None,
        )

    def draw(self, split: str) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.randint(len(TEXT) - CONTEXT, (BATCH,))
        if split == "train" and self.gives == "generator":
            places = torch.randint(len(TEXT) - CONTEXT, (BATCH,), generator=self.generator)
        if split == "train" and "position" in self.gives:
            places = self.place + torch.arange(BATCH)
            self.place += BATCH
        rows = torch.stack([TEXT[place : place + CONTEXT] for place in places])
        return rows, torch.stack([TEXT[place + CONTEXT] for place in places])

    def train(self, steps: int, at: Acts | None = None, ahead: bool = False) -> None:
        """Until so many steps are done; ``at`` says what happens in which, once each."""
        waiting = dict(at or {})
        batches: Iterator[Any] = iter(lambda: self.draw("train"), None)
        if self.gives != "nothing":
            batches = self.run.batches()
        held = next(batches) if ahead else None
        while self.run.global_step < steps and not self.run.stopping:
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-2 * math.cos(self.run.global_step / 40) * self.run.lr_scale
            if self.run.global_step % 4 == 0:
                with torch.no_grad():
                    self.model(self.draw("val")[0])
            with self.run.step() as step:
                for _ in range(ACCUMULATION):
                    rows, following = held if held is not None else next(batches)
                    self.drawn.append(int(rows[0, 0] * 61 + following[0]))
                    loss = nn.functional.cross_entropy(self.model(rows), following) / ACCUMULATION
                    held = next(batches) if ahead else None
                    self.scaler.scale(loss).backward()
                self.scaler.unscale_(self.optimizer)
                norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad(set_to_none=True)
                step.report(loss=loss * ACCUMULATION, grad_norm=norm)
                waiting.pop(step.number, int)()

    def order(self, action: str, **params: Any) -> Callable[[], None]:
        return lambda: self.sent.append(self.commander.send_and_wait(self.medic, action, **params))

    def reply(self) -> Reply:
        return self.commander.final(self.sent[-1])

    def state(self) -> list[torch.Tensor]:
        moments = [value for held in self.optimizer.state.values() for value in held.values()]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *moments)]


@pytest.fixture
def begin(commander: Commander, medic: trainmedic.Medic, tmp_path: Path) -> Iterator[Callable[..., DrawingLoop]]:
    begun: list[DrawingLoop] = []

    def make(directory: str = "checkpoints", **options: Any) -> DrawingLoop:
        begun.append(DrawingLoop(commander, medic, tmp_path / directory, **options))
        return begun[-1]

    yield make
    for loop in begun:
        loop.run.close()


def test_a_loader_function_repeats_the_batches_and_the_training(begin: Callable[..., DrawingLoop]) -> None:
    """Bit for bit, across two rollbacks, dropout and evaluations that draw in between."""
    calm = begin("calm")
    calm.train(20)
    shaken = begin("shaken")
    shaken.train(20, {8: shaken.order("job.rollback"), 17: shaken.order("job.rollback", step=10)})
    assert shaken.reply().output["data"] == "the same batches again"
    assert shaken.drawn[-10 * ACCUMULATION :] == calm.drawn[-10 * ACCUMULATION :]
    assert same(shaken.state(), calm.state())


def test_a_loader_function_can_skip_batches(begin: Callable[..., DrawingLoop]) -> None:
    """They are skipped permanently: none of them comes again, not even after a restart."""
    calm = begin("calm")
    calm.train(16)
    loop = begin()
    loop.train(10, {8: loop.order("job.rollback", skip_batches=12)})
    assert loop.reply().output["skipped_batches"] == 12
    first, after = loop.drawn[: 8 * ACCUMULATION], loop.drawn[8 * ACCUMULATION :]
    assert first == calm.drawn[: 8 * ACCUMULATION]
    assert after == calm.drawn[5 * ACCUMULATION + 12 :][: len(after)]
    loop.run.close()
    again = begin()
    torch.manual_seed(99)
    assert again.run.resume() == 10
    again.train(12)
    assert again.drawn == calm.drawn[10 * ACCUMULATION + 12 :][: len(again.drawn)]


def test_a_counting_loader_only_continues(begin: Callable[..., DrawingLoop]) -> None:
    calm = begin("calm", gives="hidden position")
    calm.train(30)
    loop = begin(gives="hidden position")
    loop.train(24, {8: loop.order("job.rollback", step=5), 18: loop.order("job.rollback", step=15, skip_batches=4)})
    for sent in loop.sent:
        assert loop.commander.final(sent).output["data"].startswith("not the same batches: a stream only goes on")
    assert loop.drawn == calm.drawn[: len(loop.drawn)]


@pytest.mark.parametrize("gives", ["position", "generator", "random iterator"])
def test_a_loader_restored_by_carried_state_is_unknown(begin: Callable[..., DrawingLoop], gives: str) -> None:
    """This is build-nanogpt's kind. Losses are compared, as batches may be the same, but none can be skipped."""
    calm = begin("calm", gives=gives)
    calm.train(30)
    loop = begin(gives=gives)
    loop.train(24, {8: loop.order("job.rollback", step=5), 18: loop.order("job.rollback", step=15, skip_batches=4)})
    first, second = map(loop.commander.final, loop.sent)
    assert (first.status, first.output["data"]) == ("applied", UNKNOWN_STREAM)
    assert first.output["verified"]["batches"] == {"compared": 0, "agreed": 0, "why": UNKNOWN_STREAM}
    assert first.output["verified"]["losses"]["agreed"] == first.output["verified"]["losses"]["compared"] > 0
    assert (second.status, second.output["reason"]) == ("rejected", CANNOT_SKIP_IN_STREAM)
    again = loop.drawn[8 * ACCUMULATION :]
    assert again == calm.drawn[5 * ACCUMULATION :][: len(again)]


@pytest.mark.parametrize("carries", ["a value", "an object", "a model"])
def test_a_rollback_reads_nothing_from_a_stream(
    medic: trainmedic.Medic, sent: Sent, tmp_path: Path, carries: str
) -> None:
    """Reading may fail or block, and a batch may equal an earlier one by chance, for example two of padding."""
    read: list[int] = []
    steps: list[int] = []
    model, best = nn.Linear(4, 1), nn.Linear(1, 1)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(best.parameters()), 1)
    also = {"best": {"a value": [1.0], "an object": scheduler}.get(carries, best)}

    class Stream:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return self

        def __next__(self) -> torch.Tensor:
            number = len(read)
            read.append(number)
            return torch.zeros(2, 4) if number in (5, 8) else torch.full((2, 4), number / 100)

    settings: dict[str, Any] = {"checkpoints": tmp_path, "checkpoint_every": 5, "also": also}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    orders = {8: sent("job.rollback", step=5), 9: sent("job.rollback", step=5, skip_batches=1)}
    with trainmedic.torch.attach(medic, loader=Stream(), model=model, optimizer=optimizer, **settings) as run:
        for batch in run.batches(steps=30):
            with run.step() as step:
                model(batch).square().mean().backward()
                optimizer.step()
                assert len(read) == 1 + len(steps)
                steps.append(step.number)
                orders.pop(step.number, int)()
    first, second = sent.replies()
    assert first.status == "applied"
    assert len(read) == (33 if carries != "a model" else 37)
    if carries == "a model":
        assert first.output["data"] == "not the same batches: a stream only goes on; 3 batches since then are left out"
        assert (second.status, second.output["skipped_batches"]) == ("applied", 1)
    else:
        assert (first.output["data"], second.status) == (UNKNOWN_STREAM, "rejected")


def test_a_skip_without_a_loader_is_rejected_and_nothing_is_claimed(begin: Callable[..., DrawingLoop]) -> None:
    """The rejection says what to do, and comes before any change."""
    calm = begin("calm", gives="nothing")
    calm.train(12)
    loop = begin(gives="nothing")
    loop.train(12, {8: loop.order("job.rollback", skip_batches=200)})
    assert loop.reply().status == "rejected"
    assert "to attach(loader=...)" in loop.reply().output["reason"]
    assert same(loop.state(), calm.state())
    loop.train(32, {13: loop.order("job.rollback")})
    assert loop.reply().status == "applied"
    assert loop.reply().output["data"] == "not known: the loop draws its own batches"
    assert "skipped_batches" not in loop.reply().output


def test_a_loop_that_draws_its_batches_ahead_is_reported(begin: Callable[..., DrawingLoop]) -> None:
    """It trains on one batch of the abandoned run, whatever the source does; so no better result is reported."""
    loop = begin()
    loop.train(9, {8: loop.order("job.rollback")}, ahead=True)
    assert loop.reply().output["data"] == FETCHED_AHEAD
    assert FETCHED_AHEAD.startswith("not the same batches: ")
