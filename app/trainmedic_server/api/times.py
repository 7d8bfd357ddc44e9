"""Times in queries: a moment, or a duration before now."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, Field

from trainmedic_core import duration
from trainmedic_server.errors import PayloadError


def _checked_time(text: str) -> str:
    time_of(text, datetime(2000, 1, 1, tzinfo=UTC))  # any time will do: only the form is checked
    return text


# It stays text until the request is handled: a duration needs the clock.
TimeText = Annotated[
    str,
    AfterValidator(_checked_time),
    Field(
        max_length=64,
        description="RFC 3339 time, or a Prometheus duration before now.",
        examples=["2026-01-31T12:00:00Z", "24h"],
    ),
]


def span_of(since: str | None, until: str | None, now: datetime) -> tuple[datetime | None, datetime | None]:
    """Return None for no limit. Raises PayloadError if `until` is before `since`."""
    begin, end = (time_of(text, now) if text else None for text in (since, until))
    if begin is not None and end is not None and begin > end:
        raise PayloadError.at([("until", "must not be before 'since'")])
    return begin, end


def time_of(text: str, now: datetime) -> datetime:
    """Parse a time with its zone, or a duration before `now`. Return UTC. Raises ValueError."""
    try:
        return now - duration.parse(text)
    except (ValueError, OverflowError):
        pass
    try:
        # An unencoded plus sign arrives as a space.
        time = datetime.fromisoformat(text.upper().replace(" ", "+"))
        if time.tzinfo is not None:
            return time.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise ValueError(
        "must be an RFC 3339 time with its zone (2026-01-31T12:00:00Z), or a duration (24h, at most 700000d)"
    )
