"""Stored sessions of the console."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Protocol

from trainmedic_server.domain.session import Session


class StoredSessions(Protocol):
    def all(self) -> list[Session]:
        """Include expired ones, oldest first."""
        ...

    def add(self, session: Session) -> None: ...
    def end(self, ids: Collection[str]) -> None: ...

    def end_before(self, moment: datetime) -> None: ...  # those that have expired by then
