"""Random trainings of two and three ranks, as a program for the test of truth: ``ranks_commanded.py FIRST COUNT``.

Each of the processes, which RANK and MASTER_PORT tell apart and bring together, is a rank of each training that has so
many; its process group is made anew for every life. What differs is printed, and ends the program. Not here: what is
compared (``answers``).
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.integration.plain_torch.truth.answers import Story
from tests.integration.plain_torch.truth.chance import is_exact, knowledge_of, lives_of, recipe_of_ranks
from tests.integration.plain_torch.truth.commanded import Commanded, placed
from tests.integration.plain_torch.truth.recipes import Place, Recipe
from tests.support.command_sender import Commander

MOST = 3


def wrap(recipe: Recipe, model: nn.Module) -> Any:
    if recipe.wrapped == "fsdp":
        return fully_shard(model)
    return DistributedDataParallel(model, find_unused_parameters=False)


def train(seed: int, rank: int, store: Any, redis_url: str) -> Counter[str]:
    """The training of that seed, if this rank is one of its; how many of which answers it got."""
    chance = Random(seed)
    ranks, wrapped = chance.choice([2, MOST]), chance.choice(["ddp", "fsdp"])
    recipe = recipe_of_ranks(chance, wrapped)
    lives = lives_of(chance, recipe, 40)
    if wrapped == "ddp" and len(lives) > 1:
        # In a new process DDP lays its buckets out anew, and three numbers are then added in another order.
        ranks = 2
    if rank >= ranks:
        return Counter()
    told = f"{seed}: {ranks} ranks, {recipe}, {lives}"
    print(told, flush=True)
    place = Place(rank, ranks, wrap)
    commander = Commander(redis_url, f"truth-{os.getppid()}-{seed}")
    training = Commanded(commander, recipe, Path(f"saved-{seed}"), place)
    for number, life in enumerate(lives):
        with Group(f"{seed}-{number}", place, store):
            training.live(life)
    commander.close()
    with Group(f"{seed}-plain", place, store):
        shared: list[Any] = [training.sent if rank == 0 else None]
        dist.broadcast_object_list(shared)
        story = Story(knowledge_of(recipe, place), is_exact(lives))
        story.tell(placed(training.log, shared[0], rank))
        dist.barrier()
    return Counter(reply.status for each in shared[0] for reply in each.replies.values())


class Group:
    """The process group of one life."""

    def __init__(self, name: str, place: Place, store: Any) -> None:
        self.name, self.place, self.store = name, place, store

    def __enter__(self) -> None:
        prefixed = PrefixStore(self.name, self.store)
        ranks = {"rank": self.place.rank, "world_size": self.place.ranks}
        dist.init_process_group("gloo", store=prefixed, timeout=timedelta(seconds=60), **ranks)

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            dist.destroy_process_group()


def main(first: int, count: int) -> None:
    torch.set_num_threads(1)
    os.environ.pop("TRAINMEDIC_SIGNING_KEY", None)  # the commander does not sign
    rank = int(os.environ["RANK"])
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=rank == 0, wait_for_workers=False)
    heard: Counter[str] = Counter()
    for seed in range(first, first + count):
        heard += train(seed, rank, store, os.environ["TRAINMEDIC_REDIS_URL"])
    print(f"{count} trainings from {first}: {dict(heard)}", flush=True)
    # Rank 0 keeps the store until all are done.
    store.set(f"done-{rank}", "")
    if rank == 0:
        store.wait([f"done-{number}" for number in range(MOST)], timedelta(seconds=60))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
