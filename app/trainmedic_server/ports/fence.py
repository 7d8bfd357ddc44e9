"""The fence: what is asked right before each effect outside, so that of several servers only the leader acts.

A server can lose its leadership at any moment, and learns of it late. So each place that acts asks again, as late
as it can: before an action, before each change in Kubernetes, before commands are sent and replies are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Fence: TypeAlias = Callable[[], object]
"""Returns where this server may act. Elsewhere the process ends, or StoreUnavailable is raised."""


def no_fence() -> None:
    """The fence of a server that shares its store with no other: it may always act."""
