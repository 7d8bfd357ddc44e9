"""Stored sessions of the console."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Protocol

from msgspec import Struct


class Session(Struct, frozen=True):
    """A signed-in browser session of the console. Times are aware UTC."""

    id: str  # UUIDv7, public: it grants no access
    digest: str  # SHA-256 of the cookie's secret, hexadecimal
    name: str  # the token's
    token: str  # SHA-256, hexadecimal, as in the tokens file. The session ends with the token.
    created_at: datetime
    ends_at: datetime
    address: str  # peer address, possibly a proxy's
    browser: str  # header User-Agent


class StoredSessions(Protocol):
    def all(self) -> list[Session]:
        """Include expired ones, oldest first."""
        ...

    def add(self, session: Session) -> None: ...
    def end(self, ids: Collection[str]) -> None: ...

    def end_before(self, moment: datetime) -> None: ...  # those that have expired by then
