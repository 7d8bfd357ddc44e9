"""Number of random examples that a property test plays."""

from __future__ import annotations

import os

from tests.support import parts

_FEWER = 5


def examples(many: int) -> int:
    """Return a fifth of `many` in the quick part, else `many`. ``TRAINMEDIC_TEST_EXAMPLES`` replaces both."""
    wanted = os.environ.get("TRAINMEDIC_TEST_EXAMPLES")
    if wanted:
        return int(wanted)
    return max(1, many // _FEWER) if parts.selected is parts.Part.QUICK else many
