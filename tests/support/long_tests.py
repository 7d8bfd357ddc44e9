"""Which kinds of a long test run: by default the first one, with ``TRAINMEDIC_TEST_KINDS=all`` all of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

Kind = TypeVar("Kind")


def some_of(kinds: Sequence[Kind]) -> Sequence[Kind]:
    """The kinds of a test of several processes, each of which takes the better part of a minute."""
    return kinds if os.environ.get("TRAINMEDIC_TEST_KINDS") == "all" else kinds[:1]
