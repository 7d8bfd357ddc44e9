"""A check as late as possible before each external effect, so that only the leader acts.

A server learns late that it lost leadership.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Fence: TypeAlias = Callable[[], object]
"""Returns if this server may act. Otherwise it ends the process or raises StoreUnavailable."""


def no_fence() -> None:
    """For a server with a store of its own."""
