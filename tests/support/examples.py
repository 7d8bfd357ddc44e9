"""How many of its examples a property test plays: a fifth in the quick part, and as many as are left in the rest."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

from tests.support import parts

Item = TypeVar("Item")
_FEWER = 5
_EVERY = 5  # odd, so that every second one is among them


def examples(many: int, are_random: bool = True) -> int:
    """Return how many of `many` the part plays. ``TRAINMEDIC_TEST_EXAMPLES`` replaces it.

    If they are not random, the rest begins with those of the quick part, and so plays all.
    """
    wanted = os.environ.get("TRAINMEDIC_TEST_EXAMPLES")
    if wanted:
        return int(wanted)
    quick = max(1, many // _FEWER)
    rest = max(1, many - quick) if are_random else many
    return {parts.Part.QUICK: quick, parts.Part.REST: rest, None: many}[parts.selected]


def some(of: Iterable[Item]) -> Sequence[Item]:
    """Return the first and each fifth after it in the quick part, the others in the rest, and all without a part."""
    return [item for number, item in enumerate(of) if parts.selected in (None, _part_of(number))]


def _part_of(number: int) -> parts.Part:
    return parts.Part.REST if number % _EVERY else parts.Part.QUICK
