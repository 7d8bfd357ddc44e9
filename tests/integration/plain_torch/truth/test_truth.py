"""The answers to commands are true: a plain training that does what they say comes to the same, to the bit.

Random trainings of one rank and of several, with random commands at random steps and restarts in between, over a real
Redis. ``TRAINMEDIC_TEST_TRAININGS=1000`` in the environment looks at so many of one rank, in place of a few,
``TRAINMEDIC_TEST_TRAININGS_OF_RANKS`` of two and three, and ``TRAINMEDIC_TEST_SEED`` says with which to begin.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.integration.plain_torch.truth.answers import Story
from tests.integration.plain_torch.truth.chance import is_exact, knowledge_of, lives_of, recipe_of
from tests.integration.plain_torch.truth.commanded import Commanded, Life, Order, placed
from tests.integration.plain_torch.truth.recipes import Recipe
from tests.support.command_sender import Commander
from tests.support.programs import free_port
from tests.support.rank_processes import RankProcesses
from trainmedic.recovery import memory_slots
from trainmedic.wire.envelope import new_id

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # of torchdata's loader
TRAININGS = int(os.environ.get("TRAINMEDIC_TEST_TRAININGS", "12"))
OF_RANKS = int(os.environ.get("TRAINMEDIC_TEST_TRAININGS_OF_RANKS", "1"))
FIRST = int(os.environ.get("TRAINMEDIC_TEST_SEED", "0"))
RANKS = 3


def check(redis_url: str, recipe: Recipe, lives: tuple[Life, ...]) -> Counter[str]:
    """Live through them, and hold what was seen to what was answered; how many of which answers there were."""
    commander = Commander(redis_url, f"truth-{new_id()}")
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        shared = Path(directory, "shared")
        shared.mkdir()
        patch.setenv(memory_slots.ENVIRONMENT, str(shared))
        training = Commanded(commander, recipe, Path(directory, "saved"))
        try:
            for life in lives:
                training.live(life)
        finally:
            commander.close()
        story = Story(knowledge_of(recipe), is_exact(lives))
        story.tell(placed(training.log, training.sent))
    return Counter(story.counts)


def test_a_training_is_what_its_answers_say(redis_url: str) -> None:
    """The check covers parameters, moments, schedule, averages, random numbers, batches and rates at every step."""
    heard: Counter[str] = Counter()
    faults: dict[str, str] = {}
    for seed in range(FIRST, FIRST + TRAININGS):
        chance = Random(seed)
        recipe = recipe_of(chance)
        lives = lives_of(chance, recipe)
        try:
            heard += check(redis_url, recipe, lives)
        except Exception as error:  # whatever it is: the others are to be seen as well
            faults[f"{seed}: {recipe}, {lives}"] = f"{type(error).__name__}: {error}"
    print(f"{TRAININGS} trainings from {FIRST}: {dict(heard)}")
    assert not faults, "\n\n".join(f"{told}\n    {which}" for which, told in faults.items())
    assert heard["job.rollback applied"]


def back(at: int, step: int, skip: int = 0) -> Order:
    return Order(at, "job.rollback", (("step", step), ("skip_batches", skip)))


FOUND = {
    "what is left out stays so after a restart": (
        Recipe(loader="function", every=4),
        (Life(6, (back(5, 4, 3),), crashes=True), Life(4)),
    ),
    "and in a source that is read again": (
        Recipe(loader="shuffling", every=4, augments=False),
        (Life(6, (back(5, 4, 9),), crashes=True), Life(4)),
    ),
    "after a skip the next epochs of such a source are other ones": (
        Recipe(loader="shuffling", drop_last=True, within=True, accumulation=3, every=20, augments=False),
        (Life(12, (back(6, 0, 3),)),),
    ),
    "what is left out stays so after another rollback": (
        Recipe(loader="list", every=4),
        (Life(12, (back(5, 4, 3), back(5, 4))),),
    ),
    "leaving out again what was left out is no other batch": (
        Recipe(loader="in_order", every=4, augments=False),
        (Life(12, (back(5, 4, 2), back(7, 4, 2))),),
    ),
    "nor over the end of an epoch": (
        Recipe(loader="iterable", every=2, augments=False),
        (Life(30, (back(7, 6, 4), back(12, 4, 4))),),
    ),
    "a loop that takes a batch ahead may go back after its first step": (
        Recipe(ahead=True, augments=False),
        (Life(6, (back(0, 0),)),),
    ),
    "what was dropped at the end of an epoch was not left out": (
        Recipe(loader="in_order", drop_last=True, every=2, augments=False),
        (
            Life(
                22,
                (
                    back(6, 6, 1),
                    Order(7, "job.scale_batch", (("factor", 0.5), ("keep_global_batch", False))),
                    back(8, 4),
                ),
            ),
        ),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_earlier_failures_do_not_recur(name: str, redis_url: str) -> None:
    """These are trainings of which an answer was once untrue."""
    recipe, lives = FOUND[name]
    heard = check(redis_url, recipe, lives)
    assert heard["job.rollback applied"] == sum(
        order.action == "job.rollback" for life in lives for order in life.orders
    )


def test_the_ranks_of_a_training_are_what_their_answers_say(job: RankProcesses) -> None:
    """Two and three ranks, with DDP and FSDP, are compared with a plain training of as many ranks."""
    shared = job.directory / "shared"
    shared.mkdir()
    surroundings = {"MASTER_PORT": str(free_port()), memory_slots.ENVIRONMENT: str(shared)}
    for rank in range(RANKS):
        program = ("-m", "tests.integration.plain_torch.truth.ranks_commanded", str(FIRST), str(OF_RANKS))
        job.start(*program, RANK=str(rank), **surroundings)
    ended: list[Any] = [None]
    while None in ended and not any(ended):
        time.sleep(0.1)
        ended = [process.poll() for process in job.processes]
    if any(ended):
        time.sleep(2)  # the others end of it, and say more
    assert ended == [0] * RANKS, job.log()
    print(job.log())
