"""Random recipes, random lives of them, and what is known beforehand of their data: what the test of truth draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from tests.integration.plain_torch.truth.commanded import FACTORS, Life, Order
from tests.integration.plain_torch.truth.plain_course import Difference, Knowledge
from tests.integration.plain_torch.truth.recipes import (
    ALONE,
    INDEXED,
    LOADERS,
    MODELS,
    OPTIMIZERS,
    PRECISIONS,
    SAMPLES,
    SCHEDULERS,
    Batch,
    Place,
    Recipe,
    distributed,
    make_loader,
    stack,
)
from trainmedic.torch.sources.source_choice import batch_source_for


def recipe_of(chance: Random) -> Recipe:
    loader = chance.choice(LOADERS)
    return Recipe(
        model=chance.choice(MODELS),
        optimizer=chance.choice(OPTIMIZERS),
        scheduler=chance.choice(SCHEDULERS),
        precision=chance.choice(PRECISIONS),
        loader=loader,
        workers=2 if loader in INDEXED and chance.random() < 0.1 else 0,
        drop_last=chance.random() < 0.5,
        augments=chance.random() < 0.5,
        ahead=chance.random() < 0.2,
        within=chance.random() < 0.25,
        own_calls=chance.random() < 0.5,
        accumulation=chance.choice([1, 1, 2, 3, 4]),
        ema=chance.random() < 0.3,
        every=chance.randint(2, 6),
        memory=chance.choice(["none", "none", "made", "asynchronous"]),
        seed=chance.randint(1, 1000),
        buffers=chance.random() < 0.2,
    )


def recipe_of_ranks(chance: Random, wrapped: str) -> Recipe:
    """A training of several ranks; what PyTorch shards it does not average, nor scale on a CPU."""
    recipe = recipe_of(chance)
    is_sharded = wrapped == "fsdp"
    loader = chance.choice(["distributed", "distributed", *LOADERS_OF_RANKS])
    return replace(
        recipe,
        loader=loader,
        wrapped=wrapped,
        optimizer=chance.choice([recipe.optimizer, "local_norms" if is_sharded else "owned"]),
        workers=recipe.workers if loader in INDEXED else 0,
        ema=recipe.ema and not is_sharded,
        precision=chance.choice(["fp32", "bf16"]) if is_sharded else recipe.precision,
    )


LOADERS_OF_RANKS = tuple(loader for loader in LOADERS if loader not in ("stream", "liar"))


def lives_of(chance: Random, recipe: Recipe, longest: int = 14) -> tuple[Life, ...]:
    """One to three of them. A stream begins anew at a start, and one that is shuffled through a buffer goes on with
    other samples there, of which no answer tells but the log."""
    many = 1 if recipe.loader in ("stream", "buffered_stream", "liar") else chance.randint(1, 3)
    found = []
    for _ in range(many):
        steps = chance.randint(1, longest)
        orders = [_order(chance, recipe, steps) for _ in range(chance.randint(0, 4))]
        found.append(Life(steps, tuple(sorted(orders, key=lambda order: order.at)), chance.random() < 0.5))
    return tuple(found)


ACTIONS = (
    *["job.rollback"] * 6,
    *["job.scale_lr", "job.accumulate", "job.scale_batch"] * 2,
    *["job.checkpoint", "job.pause", "job.resume", "job.stop", "job.empty_cache", "job.dataloader_workers"],
)
"""Rollbacks are what most may be wrong in."""


def _order(chance: Random, recipe: Recipe, steps: int) -> Order:
    at, action = chance.randrange(steps), chance.choice(ACTIONS)
    if action == "job.rollback":
        params: dict[str, Any] = {}
        kind = chance.choice(["step", "steps_back", "newest", "before"])
        if kind in ("step", "steps_back"):
            params[kind] = chance.randint(0, 12 if kind == "step" else 6)
        params["skip_batches"] = chance.choice([0, 0, 0, 1, 2, 3, 7, 20])
        return Order(at, action, tuple(params.items()), before=chance.randint(0, 9) if kind == "before" else None)
    factor = chance.choice([0.5, 0.5, 0.25, 2.0, 4.0, 0.3])
    given: dict[str, dict[str, Any]] = {
        "job.scale_lr": {"factor": factor},
        "job.accumulate": {"factor": factor},
        "job.scale_batch": {"factor": factor, "keep_global_batch": chance.random() < 0.5},
        "job.pause": {"max": "60ms"},
        "job.stop": {"checkpoint": chance.random() < 0.5},
        # That workers begin takes long, so that only some of them do.
        "job.dataloader_workers": {"count": chance.choice([0, 0, 0, 1])},
    }
    is_undo = action in FACTORS and chance.random() < 0.35
    return Order(at, action, tuple(given.get(action, {}).items()), undoes=chance.randint(0, 3) if is_undo else None)


def is_exact(lives: tuple[Life, ...]) -> bool:
    """Whether all rates are scaled by powers of two, so that no scale rounds."""
    orders = [order for life in lives for order in life.orders if order.action == "job.scale_lr"]
    return all(dict(order.params)["factor"] != 0.3 for order in orders)


def knowledge_of(recipe: Recipe, place: Place = ALONE) -> Knowledge:
    """What a training that is not commanded draws, and what PyTorch's samplers say by themselves."""
    plain = replace(recipe, augments=False, workers=0, drop_last=recipe.drop_last and recipe.loader == "batch_sampler")
    if recipe.loader in ("function", "stream"):
        return Knowledge(recipe, place, _no_order, numbered=_numbered(recipe, place))
    if recipe.loader == "distributed":
        return Knowledge(recipe, place, lambda epoch: _dealt(recipe, epoch, place))
    return Knowledge(recipe, place, _Orders(plain, place) if recipe.loader in INDEXED else _no_order)


def _no_order(epoch: int) -> list[Any]:
    raise AssertionError("these data have no order that is known")


def _dealt(recipe: Recipe, epoch: int, place: Place) -> list[int]:
    sampler = distributed(recipe, place)
    sampler.set_epoch(epoch)
    return list(sampler)


def _numbered(recipe: Recipe, place: Place) -> Callable[[int], Batch]:
    if recipe.loader == "stream":
        return lambda number: stack([number, number + 1], False)
    source = batch_source_for(make_loader(recipe, place), recipe.seed, place.rank)
    drawn: list[Batch] = []

    def numbered(number: int) -> Batch:
        while len(drawn) <= number:
            drawn.append(source.next())
        return drawn[number]

    return numbered


class _Orders:
    """The entries of each epoch, as they come in a training to which nothing happens."""

    def __init__(self, plain: Recipe, place: Place) -> None:
        self._plain = plain
        self._source = batch_source_for(make_loader(plain, place), plain.seed, place.rank)
        self._epochs: list[list[Any]] = []

    def __call__(self, epoch: int) -> list[Any]:
        while len(self._epochs) <= epoch:
            self._epochs.append(self._read())
        return self._epochs[epoch]

    def _read(self) -> list[Any]:
        entries: list[Any] = []
        while True:
            try:
                _, numbers = self._source.next()
            except StopIteration:
                break
            entries += [numbers.tolist()] if self._plain.loader == "batch_sampler" else numbers.tolist()
        if self._plain.loader == "batch_sampler":
            return entries
        expected = range(3, SAMPLES) if self._plain.loader == "sampler" else range(SAMPLES)
        if sorted(entries) != list(expected) or (self._plain.loader == "in_order" and entries != list(expected)):
            raise Difference(f"an epoch is not of each sample once: {entries}")
        return entries
