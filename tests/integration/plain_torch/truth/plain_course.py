"""The plain training that a course of a commanded one is held to: a loop of PyTorch alone that never goes back.

A course is what a training consists of after all: its steps from the first one on, without those that were abandoned.
Since a rollback is said to leave no trace of these, a loop that never did them comes to the same numbers. Which batches
come, and which are left out, is worked out here from the answers alone. Not here: what the answers are
(``answers``), and Trainmedic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.integration.plain_torch.truth.commanded import Trained
from tests.integration.plain_torch.truth.recipes import (
    INDEXED,
    READ_ON,
    Batch,
    Parts,
    Place,
    Recipe,
    digest_of,
    draw,
    make_loader,
    stack,
)


class DataPlace(NamedTuple):
    """A position in the data: an epoch, and how many entries of its order lie before it."""

    epoch: int
    entries: int


@dataclass
class Planned:
    """A step of a course: what was seen of it, and what was in force in it.

    ``held`` says that the loop held its first batch when it went back to before this step; ``anew`` that the process
    was started there; ``jump`` to which number a stream has come there.
    """

    seen: Trained
    accumulation: int
    batch: int
    workers: int
    scale: float
    held: bool = False
    anew: bool = False
    drawn: bool = False
    """Whether a loop that draws its own batches had drawn one when the checkpoint of step 0 was written."""
    jump: int | None = None


@dataclass
class Knowledge:
    """What is known of a recipe's data beside it: the orders of its epochs, and what workers made of a batch."""

    recipe: Recipe
    place: Place
    order: Callable[[int], list[Any]]
    made: dict[Any, Batch] = field(default_factory=dict)
    numbered: Callable[[int], Batch] | None = None


class Difference(AssertionError):
    """What was seen is not what the answers describe."""


class IndexedBatches:
    """Batches of samples whose order is known, without those that are left out."""

    def __init__(self, knowledge: Knowledge, left_out: set[DataPlace]) -> None:
        self._knowledge = knowledge
        self._left_out = left_out
        self.place = DataPlace(0, 0)

    def next(self, planned: Planned, seen: Batch | None) -> Batch:
        recipe = self._knowledge.recipe
        while True:
            epoch, begin = self.place
            order = self._knowledge.order(epoch)
            at, entries = begin, []
            size = 1 if recipe.loader == "batch_sampler" else planned.batch
            while at < len(order) and len(entries) < size:
                if DataPlace(epoch, at) not in self._left_out:
                    entries.append((at, order[at]))
                at += 1
            drops = recipe.drop_last and recipe.loader != "batch_sampler"
            if not entries or (drops and len(entries) < size):
                self.place = DataPlace(epoch + 1, 0)
                continue
            self.place = DataPlace(epoch, at)
            numbers = entries[0][1] if recipe.loader == "batch_sampler" else [entry for _, entry in entries]
            if not planned.workers or seen is None:
                return stack(numbers, recipe.augments and not planned.workers)
            # Workers make a batch with random numbers of its own place: the same whenever it comes.
            return self._knowledge.made.setdefault((epoch, entries[0][0], tuple(numbers)), seen)

    def leave_out(self, place: DataPlace, batches: int, size: int) -> set[DataPlace]:
        """The entries of the next batches from there on."""
        recipe, found = self._knowledge.recipe, set()
        size = 1 if recipe.loader == "batch_sampler" else size
        drops = recipe.drop_last and recipe.loader != "batch_sampler"
        epoch, at = place
        while batches:
            left = min(size, len(self._knowledge.order(epoch)) - at)
            if left <= 0 or (drops and left < size):
                epoch, at = epoch + 1, 0
                continue
            found |= {DataPlace(epoch, at + number) for number in range(left)}
            at, batches = at + left, batches - 1
        return found


class ReadBatches:
    """Batches of anything that a plain loop iterates over; those that are left out are read and dropped."""

    def __init__(self, knowledge: Knowledge, left_out: set[DataPlace]) -> None:
        self._loader = make_loader(knowledge.recipe, knowledge.place)
        self._left_out = left_out
        self._iterator: Iterator[Batch] | None = None
        self._length: int | None = None
        self.place = DataPlace(0, 0)

    def next(self, planned: Planned, seen: Batch | None) -> Batch:
        while True:
            self.begin()
            place, batch = self.place, next(self._iterator, None)
            if batch is None:
                self._length = place.entries
                self._iterator, self.place = None, DataPlace(place.epoch + 1, 0)
                continue
            self.place = DataPlace(place.epoch, place.entries + 1)
            if place not in self._left_out:
                return batch

    def begin(self) -> None:
        if self._iterator is None:
            self._iterator = iter(self._loader)

    def leave_out(self, place: DataPlace, batches: int, size: int) -> set[DataPlace]:
        length = self._length if self._length is not None else sum(1 for _ in self._loader)
        numbers = range(place.entries, place.entries + batches)
        return {DataPlace(place.epoch + number // length, number % length) for number in numbers}


class NumberedBatches:
    """Batches that follow from their number: of a function that draws them, and of a stream."""

    def __init__(self, knowledge: Knowledge, left_out: set[DataPlace]) -> None:
        self._made = knowledge.numbered
        self._left_out = left_out
        self._jumped: Planned | None = None
        self.place = DataPlace(0, 0)

    def next(self, planned: Planned, seen: Batch | None) -> Batch:
        assert self._made is not None
        if planned.jump is not None and self._jumped is not planned:
            self.place, self._jumped = DataPlace(0, planned.jump), planned
        while self.place in self._left_out:
            self.place = DataPlace(0, self.place.entries + 1)
        self.place = DataPlace(0, self.place.entries + 1)
        return self._made(self.place.entries - 1)

    def leave_out(self, place: DataPlace, batches: int, size: int) -> set[DataPlace]:
        return {DataPlace(0, place.entries + number) for number in range(batches)}


class OwnBatches:
    """Batches that the loop draws itself, or of which nothing is promised (``given``)."""

    def __init__(self, knowledge: Knowledge, left_out: set[DataPlace]) -> None:
        self._recipe = knowledge.recipe
        self.place = DataPlace(0, 0)

    def next(self, planned: Planned, seen: Batch | None) -> Batch:
        if self._recipe.loader == "own_draws":
            return draw(self._recipe)
        assert seen is not None
        return seen

    def leave_out(self, place: DataPlace, batches: int, size: int) -> set[DataPlace]:
        return set()


def batches_of(knowledge: Knowledge, left_out: set[DataPlace]) -> Any:
    """The batches of a training that begins."""
    loader = knowledge.recipe.loader
    if loader in INDEXED:
        return IndexedBatches(knowledge, left_out)
    if loader in READ_ON:
        return ReadBatches(knowledge, left_out)
    return (NumberedBatches if loader in ("function", "stream") else OwnBatches)(knowledge, left_out)


@dataclass
class Reached:
    """What a plain training was after each of its steps, from step 0 on: its parts, place and unscaled rates."""

    after: list[dict[str, str]]
    places: list[DataPlace]
    rates: list[list[float]]


def hold(knowledge: Knowledge, course: list[Planned], left_out: set[DataPlace], exact: bool) -> Reached:
    """Train the course plainly, and compare each step with what was seen of it. Raises Difference.

    ``exact`` says that scaled rates are to be right to the bit as well, as they are where the factors are powers of 2.
    """
    recipe = knowledge.recipe
    parts = Parts(recipe, knowledge.place)
    source = batches_of(knowledge, left_out)
    reached = Reached([parts.fingerprints()], [source.place], [parts.rates])
    held: Batch | None = None
    for planned, following in zip(course, [*course[1:], None], strict=False):
        seen = planned.seen
        held = seen.batches[0] if planned.held else None if planned.anew else held
        taken = following.seen.batches[0] if following and not (following.held or following.anew) else None
        held = _train(parts, source, planned, held, exact, len(reached.after), taken)
        found = parts.fingerprints()
        _compare(f"step {seen.number}: what it has left", seen.after, found)
        reached.after.append(found)
        reached.places.append(source.place)
        reached.rates.append(parts.rates)
    return reached


def _train(
    parts: Parts,
    source: Any,
    planned: Planned,
    held: Batch | None,
    exact: bool,
    number: int,
    taken: Batch | None,
) -> Batch | None:
    """One step; the batch that the loop holds after it. ``taken`` is what was seen of that."""
    recipe, seen = parts.recipe, planned.seen
    where = f"step {seen.number}"
    _compare(f"{where}: its number", seen.number, number)
    _compare(f"{where}: its batches", len(seen.batches), planned.accumulation)
    if planned.held and recipe.loader in ("stateful", "buffered_stream"):
        source.begin()  # to be asked for its state, for the checkpoint that was gone back to
    if planned.drawn:
        source.next(planned, seen.batches[0])
    ahead = recipe.ahead and recipe.loader != "liar"  # of which any batches are taken as they come
    if ahead and held is None:
        held = source.next(planned, seen.batches[0])
    losses = []
    for micro, (batch_seen, digest, loss_seen) in enumerate(zip(seen.batches, seen.digests, seen.losses, strict=True)):
        batch = source.next(planned, batch_seen) if held is None else held
        told = f"{where}, batch {micro}"
        _compare(f"{told}: its samples", batch_seen[1].tolist(), batch[1].tolist())
        _compare(f"{told}: what they look like", digest, digest_of(batch))
        loss = parts.loss(batch)
        following = seen.batches[micro + 1] if micro + 1 < len(seen.batches) else taken
        held = source.next(planned, following) if ahead else None
        _compare(f"{told}: its loss", loss_seen, loss.item())
        parts.backward(loss, planned.accumulation)
        losses.append(loss.item())
    _update(parts, planned, exact, where, sum(losses) / len(losses))
    return held


def _update(parts: Parts, planned: Planned, exact: bool, where: str, loss: float) -> None:
    """The optimizer's step with scaled rates, the schedule's with those of the script."""
    parts.set_own_rates(planned.seen.number)
    own, seen = parts.rates, planned.seen.rates
    for rate, rate_seen in zip(own, seen, strict=True):
        scaled = rate * planned.scale
        is_same = scaled == rate_seen if exact else math.isclose(scaled, rate_seen, rel_tol=1e-9)
        if not is_same:
            raise Difference(f"{where}: its rate is {rate_seen!r}, and was to be {rate!r} times {planned.scale!r}")
    _set_rates(parts, seen)
    parts.apply()
    _set_rates(parts, own)
    parts.advance(loss)


def _set_rates(parts: Parts, rates: list[float]) -> None:
    for group, rate in zip(parts.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _compare(what: str, seen: Any, expected: Any) -> None:
    if seen != expected:
        if isinstance(seen, dict):
            names = [name for name in expected if seen.get(name) != expected[name]]
            raise Difference(f"{what}: {len(names)} of {len(expected)} differ: {', '.join(names[:8])}")
        raise Difference(f"{what}: {seen!r}, and was to be {expected!r}")
