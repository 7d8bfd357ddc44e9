"""The settings that bound what the engine does; made by ``settings``, handed in by ``wiring``."""

from __future__ import annotations

from datetime import timedelta

from msgspec import Struct

from trainmedic_server.domain.modes import Mode


class EngineLimits(Struct, frozen=True):
    """How far the engine may go. The reasons for the defaults are in ``settings.server``."""

    mode: Mode = Mode.OBSERVE
    """The server's mode; the stricter of this and the playbook's is used."""
    max_age: timedelta = timedelta(minutes=15)
    """Alerts that are older are stale, and not acted on."""
    assume_resolved_after: timedelta = timedelta(hours=12)
    """An alert that was not heard of for this long counts as resolved."""
    breaker_window: timedelta = timedelta(minutes=10)
    """How far back the breaker counts the nodes that were acted on."""
    breaker_share: float = 0.5
    """Share of the known nodes, 0 to 1, that may be acted on within the window before the breaker opens."""
    breaker_min_nodes: int = 10
    """The breaker never opens for fewer nodes."""
    queue: int = 1000
    """Deliveries that may wait for admission before more are refused."""
    external_url: str = ""
    """Where people reach the server, without a slash at its end; it begins the links in messages. Empty for none."""
