from __future__ import annotations

from datetime import datetime

from msgspec import Struct


class Session(Struct, frozen=True):
    """A signed-in browser session of the console. Times are aware UTC."""

    id: str
    """UUIDv7, public: it grants no access."""
    digest: str
    """Hash of the cookie's secret."""
    name: str
    """The user's name, which is recorded as the actor."""
    token: str
    """SHA-256 of the user's token, hexadecimal, as in the tokens file. The session ends with the token."""
    created_at: datetime
    ends_at: datetime
    address: str
    """Peer address, possibly a proxy's."""
    browser: str
    """Name of the browser, for people."""
