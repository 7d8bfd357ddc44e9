"""Engine limits from the settings."""

from __future__ import annotations

from datetime import timedelta

from msgspec import Struct

from trainmedic_server.domain.modes import Mode


class EngineLimits(Struct, frozen=True):
    """``settings.server`` explains the defaults."""

    mode: Mode = Mode.OBSERVE
    max_age: timedelta = timedelta(minutes=15)
    assume_resolved_after: timedelta = timedelta(hours=12)
    breaker_window: timedelta = timedelta(minutes=10)
    breaker_share: float = 0.5
    """Share of known nodes, 0 to 1, that runs may act on within the window."""
    breaker_min_nodes: int = 10
    queue: int = 1000
    external_url: str = ""
    """Public URL of the server, without a trailing slash; empty for none."""
