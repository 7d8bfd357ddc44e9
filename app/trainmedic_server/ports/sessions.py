"""The sessions of the console, as a unit of work sees them."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Protocol

from trainmedic_server.domain.session import Session


class StoredSessions(Protocol):
    """Sessions that have not been ended."""

    def all(self) -> list[Session]:
        """Return all, those that have run out among them, oldest first."""
        ...

    def add(self, session: Session) -> None: ...
    def end(self, ids: Collection[str]) -> None:
        """Forget the sessions of these ids; those that are unknown are passed over."""
        ...

    def end_before(self, moment: datetime) -> None:
        """Forget the sessions that have run out by `moment`."""
        ...
