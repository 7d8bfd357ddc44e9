"""A training under Trainmedic of any recipe, commanded at given steps and started again, and the log of what it did.

The log holds what the loop itself has seen, and the answers; nothing of it is asked of Trainmedic's own state but what
is public in `Run`. Not here: what the answers promise (``answers``), and the training without Trainmedic
(``plain_course``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch

import trainmedic
import trainmedic.distributed
import trainmedic.torch
from tests.integration.plain_torch.truth.recipes import (
    ALONE,
    Batch,
    Parts,
    Place,
    Recipe,
    digest_of,
    draw,
    make_loader,
)
from tests.support.command_sender import Commander
from tests.support.programs import eventually
from trainmedic.wire.envelope import APPLIED, Reply, write_time

FACTORS = {"job.scale_lr", "job.scale_batch", "job.accumulate"}


@dataclass(frozen=True)
class Order:
    """A command that is sent during a step. ``undoes`` counts back through the earlier orders of the same action, and
    ``before`` through the steps that were trained, to whose time a rollback goes back."""

    at: int
    action: str
    params: tuple[tuple[str, Any], ...] = ()
    undoes: int | None = None
    before: int | None = None


@dataclass(frozen=True)
class Life:
    """One start of a training: how many steps it does, what is ordered in which, and whether it ends in order."""

    steps: int
    orders: tuple[Order, ...] = ()
    crashes: bool = False


@dataclass
class Trained:
    """An optimizer step. ``rates`` are those that it was made with; ``after`` is what it has left."""

    number: int
    batches: list[Batch] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    after: dict[str, str] = field(default_factory=dict)


@dataclass
class Sent:
    """A command that was sent, in order, and its answer."""

    id: str
    order: Order
    params: dict[str, Any]
    life: int = 1
    undo_of: Sent | None = None
    replies: dict[int, Reply] = field(default_factory=dict)
    """By rank."""


@dataclass
class Boundary:
    """The boundary after a step, and what the training was after it. `placed` adds the commands of it."""

    number: int
    step: int
    state: dict[str, str]
    rates: list[float]
    scale: float
    accumulation: int
    sent: list[Sent] = field(default_factory=list)


@dataclass
class Begun:
    """A start of the training: the step that it has resumed from; ``dropped`` are changes that it does without."""

    resumed: int | None
    state: dict[str, str]
    rates: list[float]
    scale: float
    accumulation: int
    dropped: str = ""


Entry = Trained | Boundary | Begun


class Crash(Exception):
    """What ends a training that does not end in order."""


class Commanded:
    """The training of a recipe in `directory`, life after life; ``log`` is what has happened in all of them.

    Of several ranks each has its own. Rank 0 alone sends, one command after the other, and each is carried out at a
    later step.
    """

    def __init__(self, commander: Commander, recipe: Recipe, directory: Path, place: Place = ALONE) -> None:
        self.commander, self.recipe, self.directory, self.place = commander, recipe, directory, place
        self.log: list[Entry] = []
        self.sent: list[Sent] = []
        self.times: list[datetime] = []
        self.lives = 0

    def live(self, life: Life) -> None:
        """One life, from the newest checkpoint on if it is not the first."""
        recipe = self.recipe
        torch.set_num_threads(1)
        first, self.lives = self.lives == 0, self.lives + 1
        # A restarted script need not draw the same numbers before it resumes.
        self.parts = Parts(recipe if first else replace(recipe, seed=recipe.seed + 1000 * self.lives), self.place)
        medic = self._connected()
        dropped = _Dropped()
        logging.getLogger("trainmedic").addHandler(dropped)
        try:
            with medic, self._attached(medic) as run:
                self.run = run
                resumed = run.resume() if not first else None
                state = (self.parts.fingerprints(), self.parts.rates, run.lr_scale, run.accumulation)
                self.log.append(Begun(resumed, *state, dropped.text))
                self._train(life)
                if life.crashes:
                    self._await_other_ranks()
                    raise Crash
        except Crash:
            pass
        finally:
            logging.getLogger("trainmedic").removeHandler(dropped)
        for each in self.sent:
            if not each.replies:
                each.replies = self._replies(each, 60.0)

    def _await_other_ranks(self) -> None:
        """Wait for their answers, at most 10 s. A rank 0 that crashes waits for them for a second, which
        they exceed on a busy machine; the server then calls them unknown."""
        until = time.monotonic() + 10
        while self.place.ranks > 1 and not all(self._replies(each, 0) for each in self.sent):
            if time.monotonic() > until:
                return
            time.sleep(0.02)

    def _connected(self) -> trainmedic.Medic:
        place = self.place
        if place.ranks == 1:
            return self.commander.connect()
        name, url = self.commander.name, self.commander.url
        medic = trainmedic.connect(job=name, redis_url=url, rank=place.rank, world_size=place.ranks)
        trainmedic.distributed.share(medic, every=1)
        return medic

    def _replies(self, sent: Sent, within: float) -> dict[int, Reply]:
        """The final replies by rank, once all are there."""
        found: dict[int, Reply] = {}

        def all_are_there() -> bool:
            replies = self.commander.replies(sent.id)
            found.update({reply.rank or 0: reply for reply in replies if reply.is_final})
            return len(found) == self.place.ranks

        if within:
            eventually(all_are_there, within, f"final replies to {sent.order}", 0.005)
        return found if all_are_there() else {}

    def _attached(self, medic: trainmedic.Medic) -> trainmedic.torch.Run:
        recipe, parts = self.recipe, self.parts
        memory = None
        if recipe.memory != "none":
            memory = trainmedic.torch.Memory(every=3, share=1e6, asynchronous=recipe.memory == "asynchronous")
        return trainmedic.torch.attach(
            medic,
            model=parts.model,
            optimizer=parts.optimizer,
            scheduler=parts.scheduler,
            scaler=parts.scaler,
            ema=parts.ema,
            loader=make_loader(recipe, self.place),
            checkpoints=self.directory,
            checkpoint_every=recipe.every,
            memory=memory,
            accumulation=None if recipe.within else recipe.accumulation,
            keep=None,
            rollbacks=None,
            seed=recipe.seed if self.place.ranks > 1 else None,
            also={"buffer": parts.buffer} if recipe.buffers else None,
        )

    # --- the loop ---------------------------------------------------------------------------------------

    def _train(self, life: Life) -> None:
        recipe, run = self.recipe, self.run
        own = recipe.loader == "own_draws"
        batches: Iterator[Batch] = iter(lambda: draw(recipe), None) if own else run.batches()
        held = next(batches) if recipe.ahead else None
        orders = list(life.orders)
        trained = Trained(0)
        done = 0
        while done < life.steps and not run.stopping:
            if not (recipe.within or recipe.ahead):
                held = next(batches)
            with run.step() as step:
                trained.number = step.number
                for _ in range(recipe.accumulation if recipe.within else 1):
                    batch = next(batches) if held is None else held
                    loss = self._forward(trained, batch)
                    held = next(batches) if recipe.ahead else None
                    if recipe.own_calls or recipe.within:
                        self.parts.backward(loss, recipe.accumulation if recipe.within else run.accumulation)
                    else:
                        step.backward(loss)
                if not step.is_update:
                    step.report(loss=loss.item() if recipe.own_calls else loss)
                    continue
                self._update(step, trained, loss)
                self._send_due(orders, done)
            done += 1
            self.times.append(datetime.now(UTC))
            self.log.append(trained)
            state = (self.parts.fingerprints(), self.parts.rates, run.lr_scale, run.accumulation)
            self.log.append(Boundary(trained.number, run.global_step, *state))
            trained = Trained(0)

    def _forward(self, trained: Trained, batch: Batch) -> torch.Tensor:
        trained.batches.append(batch)
        trained.digests.append(digest_of(batch))
        loss = self.parts.loss(batch)
        trained.losses.append(loss.item())
        return loss

    def _update(self, step: Any, trained: Trained, loss: torch.Tensor) -> None:
        self.parts.set_own_rates(trained.number, step.learning_rate)
        trained.rates = self.parts.rates
        mean = sum(trained.losses) / len(trained.losses)
        if self.recipe.own_calls or self.recipe.within:
            self.parts.apply()
            self.parts.advance(mean)
            step.report(loss=mean if self.recipe.within else loss.item())
        else:
            norm = step.update(max_norm=1.0)
            self.parts.advance_by(mean)
            step.report(loss=loss, grad_norm=norm)
        trained.after = self.parts.fingerprints()

    def _send_due(self, orders: list[Order], done: int) -> None:
        """Send what is due in this step."""
        if self.place.ranks == 1:
            for order in orders:
                if order.at == done:
                    self._send(order)
        elif self.place.rank == 0 and orders and orders[0].at <= done:
            if self.sent and not self.sent[-1].replies:
                self.sent[-1].replies = self._replies(self.sent[-1], 0.0)
            if not self.sent or self.sent[-1].replies:
                self._send(orders.pop(0))

    def _send(self, order: Order) -> Sent:
        params = dict(order.params)
        undo_of = None
        if order.undoes is not None:
            earlier = [each for each in self.sent if each.order.action == order.action and each.undo_of is None]
            undo_of = earlier[-1 - order.undoes % len(earlier)] if earlier else None
        if undo_of is not None and order.action in FACTORS:
            params["factor"] = 1 / undo_of.params["factor"]
        if order.before is not None and self.times:
            moment = self.times[-1 - order.before % len(self.times)] + timedelta(microseconds=1)
            params["before"] = write_time(moment)
        undone = undo_of.id if undo_of is not None else None
        if self.place.ranks == 1:
            sent_id = self.commander.send_and_wait(self.run.medic, order.action, undo_of=undone, **params)
        else:
            sent_id = self.commander.send(order.action, undo_of=undone, **params)
        self.sent.append(Sent(sent_id, order, params, self.lives, undo_of))
        return self.sent[-1]


def placed(log: list[Entry], sent: list[Sent], rank: int = 0) -> list[Entry]:
    """The log with each command at the boundary at which it was carried out, and without the other boundaries.

    Between two rollbacks the steps only go up, so that the step in an answer says which boundary of that life it is.
    """
    begun = [number for number, entry in enumerate(log) if isinstance(entry, Begun)]
    cursor, life, position = 0, 0, -1
    for each in sent:
        reply = each.replies[rank]
        if each.life != life:
            cursor, life, position = begun[each.life - 1], each.life, -1
        if reply.status != APPLIED and "verified" not in reply.output:
            continue
        if "step" not in reply.output:  # an undo for which there was nothing to do
            continue
        step = reply.output["left_step" if each.order.action == "job.rollback" else "step"]
        if step != position:  # else it came to the boundary at which the one before it was carried out
            cursor = next(number for number in range(cursor + 1, len(log)) if _is_boundary(log[number], step))
        entry = log[cursor]
        assert isinstance(entry, Boundary)
        entry.sent.append(each)
        position = reply.output["step"]
    return [entry for entry in log if not isinstance(entry, Boundary) or entry.sent]


def _is_boundary(entry: Entry, number: int) -> bool:
    return isinstance(entry, Boundary) and entry.number == number


class _Dropped(logging.Handler):
    """Keeps the line in which a start says what it does without from now on."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "not reapplying these changes" in message:
            self.text = message
