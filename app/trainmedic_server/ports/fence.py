"""Leadership check immediately before each external effect: a server may learn late that it is no longer the leader."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Fence: TypeAlias = Callable[[], object]
"""Returns only if this server may act. Otherwise ends the process or raises StoreUnavailable."""


def no_fence() -> None:
    """Fence of a server with its own store, which is always the leader."""
