"""The answers to commands are true: a plain training that does what they say comes to the same, to the bit.

Random trainings of one rank, with random commands at random steps and restarts in between, over a real Redis.
``TRAINMEDIC_TEST_TRAININGS=1000`` in the environment looks at so many, in place of a few, and
``TRAINMEDIC_TEST_SEED`` says with which one to begin.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.integration.plain_torch.truth.answers import Story
from tests.integration.plain_torch.truth.chance import is_exact, knowledge_of, lives_of, recipe_of
from tests.integration.plain_torch.truth.commanded import Commanded, Life, Order
from tests.integration.plain_torch.truth.recipes import Recipe
from tests.support.command_sender import Commander
from trainmedic.recovery import memory_slots
from trainmedic.wire.envelope import new_id

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # of torchdata's loader
TRAININGS = int(os.environ.get("TRAINMEDIC_TEST_TRAININGS", "12"))
FIRST = int(os.environ.get("TRAINMEDIC_TEST_SEED", "0"))


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
        story.tell(training.log)
    return Counter(story.counts)


def test_a_training_is_what_its_answers_say(redis_url: str) -> None:
    """Parameters, moments, schedule, averages, random numbers, batches and rates, at every step."""
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


_ = Order
