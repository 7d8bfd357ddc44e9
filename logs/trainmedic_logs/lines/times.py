from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

_ISO = re.compile(r"\[?(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?\s?(Z|UTC|[+-]\d\d:?\d\d)(?![0-9:])")
_EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)  # clocks without battery begin at 1970


def with_zone(text: str) -> datetime | None:
    """Return the leading ISO time in UTC; None without zone or before 2000."""
    match = _ISO.match(text)
    if match is None:
        return None
    day, clock, fraction, zone = match.groups()
    if zone in ("Z", "UTC"):
        zone = "+00:00"
    elif ":" not in zone:
        zone = f"{zone[:3]}:{zone[3:]}"
    try:
        at = datetime.fromisoformat(f"{day}T{clock}.{(fraction or '0')[:6]:0<6}{zone}").astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return at if at >= _EARLIEST else None


def stated_by(text: str, record: Mapping[str, Any] | None) -> datetime | None:
    """Return the record's ``ts`` or, without a record, the line's leading time, in UTC."""
    if record is not None:
        written = record.get("ts")
        return with_zone(written) if isinstance(written, str) else None
    # Most lines begin otherwise, and comparing is cheaper than the pattern.
    return with_zone(text) if text[:2] in ("20", "[2") else None
