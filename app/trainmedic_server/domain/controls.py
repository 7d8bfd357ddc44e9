"""The switches of a server: what is paused, and whether the breaker is open."""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct

from trainmedic_server.domain.pause import OperatorPause


class Controls(Struct, frozen=True):
    """The switches that outlive a restart. Times are aware UTC datetimes."""

    paused: bool = False
    """Whether everything was paused when the switches were last looked at: the server starts nothing and does no new
    harm; undos go on. ``pauses`` are what counts."""
    paused_by: str | None = None
    paused_at: datetime | None = None
    breaker_open: bool = False
    """Whether too many nodes were acted on, so that no run starts until an operator closes the breaker."""
    breaker_opened_at: datetime | None = None
    breaker_reason: str | None = None
    """For a person: how many nodes of how many."""
    alive_at: datetime | None = None
    """The server's last heartbeat, by which a new start knows for how long it was down."""
    pauses: tuple[OperatorPause, ...] = ()
    """The pauses that are not over, those to come included, in the order in which they were ordered."""
    breaker_closed_at: datetime | None = None
    """When a person last closed the breaker; only acts after this count. None if no one has, or if the clock was set
    back to before it."""

    def breaker_counts_from(self, window_start: datetime) -> datetime:
        """Return the moment after which acts count for the breaker: the start of its window, or its last closing."""
        closed_at = self.breaker_closed_at
        return window_start if closed_at is None else max(window_start, closed_at)
