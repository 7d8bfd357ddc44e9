"""Leadership check immediately before each external effect.

A server may learn late that it has lost leadership, so an earlier check would not suffice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Fence: TypeAlias = Callable[[], object]
"""Returns only if this server may act. Otherwise ends the process or raises StoreUnavailable."""


def no_fence() -> None:
    """Fence of a server with a store of its own, which is always the leader."""
