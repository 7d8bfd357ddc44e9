"""Cursor of a page: time and ID after which the next page begins, so that new entries never shift pages."""

from __future__ import annotations

import base64
import binascii
import functools
from datetime import UTC, datetime, timedelta

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LONGEST = 1024  # Characters.


@functools.lru_cache(maxsize=1024)
def microseconds_of(moment: datetime) -> int:
    """Exact, unlike a float timestamp. Cached, because the rows of a transaction share their times."""
    return (moment - EPOCH) // _MICROSECOND


def time_of(microseconds: int) -> datetime:
    return EPOCH + timedelta(microseconds=microseconds)


def encode(at: datetime, item_id: str) -> str:
    raw = f"{microseconds_of(at)}.{item_id}".encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def decode(cursor: str) -> tuple[datetime, str]:
    """Raises ValueError."""
    try:
        if len(cursor) > _LONGEST:
            raise ValueError("too long")
        raw = base64.b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        micros, dot, item_id = raw.decode().partition(".")
        if not dot or not item_id or "\0" in item_id:
            raise ValueError("no ID in it")
        return time_of(int(micros)), item_id
    except (ValueError, OverflowError, binascii.Error) as error:
        raise ValueError(f"{cursor[:80]!r} is not a cursor of the history") from error
