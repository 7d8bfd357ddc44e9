"""How much of its examples a property test plays: less in the quick part."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TypeVar

from tests.support import parts

Item = TypeVar("Item")
_FEWER = 5
_EVERY = 5  # odd, so that every second one is among them


def examples(many: int) -> int:
    """Return a fifth of `many` in the quick part, else `many`. ``TRAINMEDIC_TEST_EXAMPLES`` replaces both."""
    wanted = os.environ.get("TRAINMEDIC_TEST_EXAMPLES")
    if wanted:
        return int(wanted)
    return max(1, many // _FEWER) if _is_quick() else many


def some(of: Iterable[Item]) -> Sequence[Item]:
    """Return the first and each fifth after it in the quick part, else all."""
    return list(islice(of, 0, None, _EVERY if _is_quick() else 1))


def _is_quick() -> bool:
    return parts.selected is parts.Part.QUICK
