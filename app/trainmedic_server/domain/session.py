from __future__ import annotations

from datetime import datetime

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
