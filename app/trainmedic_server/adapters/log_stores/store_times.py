"""Times to the nanosecond, as stores write and read them."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from trainmedic_server.adapters.log_stores.paging import NANOSECONDS, nanoseconds

_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")


def rfc3339(at: int) -> str:
    """Nanoseconds since 1970 as a time in UTC with nine digits."""
    seconds, rest = divmod(at, NANOSECONDS)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"


def nanoseconds_of(text: str) -> int:
    """Raises ValueError where it is no such time."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is no time")
    at = datetime.fromisoformat(match[1] + match[3].replace("Z", "+00:00")).astimezone(UTC)
    return nanoseconds(at) + int(f"{match[2] or '0':0<9}")
