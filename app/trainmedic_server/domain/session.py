"""A session: a browser that signed in to the console with a token, until it ends."""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct


class Session(Struct, frozen=True):
    """Times are aware UTC datetimes. The secret itself, which the browser's cookie holds, is nowhere kept."""

    id: str
    """A UUIDv7, by which people speak of it; it opens nothing."""
    digest: str
    """The SHA-256 of the cookie's secret, in hexadecimal."""
    name: str
    """The name of the token that it was begun with."""
    token: str
    """The SHA-256 of that token, in hexadecimal, as the tokens file has it: the session ends when the token does."""
    created_at: datetime
    ends_at: datetime
    address: str
    """Where the browser was, as the connection said; a proxy's where one is between."""
    browser: str
    """How the browser named itself, cut to 200 characters."""
