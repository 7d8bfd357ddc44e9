"""What the engine is told by its settings."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from trainmedic_server.domain.modes import Mode


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine is told by its settings.

    ``max_age``: older alerts are stale. ``breaker_share`` of the known nodes may be acted on within
    ``breaker_window`` before the breaker opens, and it never opens for fewer than ``breaker_min_nodes``.
    ``queue``: deliveries that may wait for admission before more are refused.
    """

    mode: Mode = Mode.OBSERVE
    max_age: timedelta = timedelta(minutes=15)
    assume_resolved_after: timedelta = timedelta(hours=12)
    breaker_window: timedelta = timedelta(minutes=10)
    breaker_share: float = 0.5
    breaker_min_nodes: int = 10
    queue: int = 1000
