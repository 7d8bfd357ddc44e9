"""How hard the attacks try: briefly within the whole of the tests, in full by ``scripts/attack``.

``TRAINMEDIC_TEST_ATTACK`` is ``short`` (the default) or ``full``. ``TRAINMEDIC_TEST_ATTACK_SEED`` repeats what was
tried: each attack that draws at random prints the seed with which it began.
"""

from __future__ import annotations

import os
import random
import secrets

IS_FULL = os.environ.get("TRAINMEDIC_TEST_ATTACK", "short") == "full"


def trials(short: int, full: int) -> int:
    """How many times something is tried: `short` within the whole of the tests, `full` by ``scripts/attack``."""
    return full if IS_FULL else short


def random_source() -> random.Random:
    """A source of random numbers, whose seed is printed, so that a failure shows it."""
    seed = int(os.environ.get("TRAINMEDIC_TEST_ATTACK_SEED") or secrets.randbelow(2**32))
    print(f"TRAINMEDIC_TEST_ATTACK_SEED={seed}")
    return random.Random(seed)
