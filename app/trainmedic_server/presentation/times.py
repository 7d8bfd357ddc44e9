"""Times and durations as text.

A time is an aware datetime or the API's RFC 3339 text.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from trainmedic_core.words import plain

Time = datetime | str | None
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def read(value: object) -> datetime | None:
    """Return None for empty or invalid text."""
    if isinstance(value, datetime):
        return value
    try:
        return datetime.fromisoformat(str(value or ""))
    except ValueError:
        return None


def stamp(value: Time) -> str:
    """Return a time as ``2026-01-31 12:00:00Z``."""
    at = read(value)
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}" if at else plain(value or None)


def time_of_day(value: Time) -> str:
    """Return the time of day in UTC, to the millisecond."""
    at = read(value)
    return f"{at.astimezone(UTC):%H:%M:%S.%f}"[:-3] if at else plain(value or None)


def span(length: float | timedelta | None) -> str:
    """Return a duration (or seconds) as ``850 ms``, ``12.3 s``, ``4 min 5 s``, ``2 d 3 h``."""
    if length is None:
        return "-"
    seconds = length.total_seconds() if isinstance(length, timedelta) else length
    if seconds < 0:
        return f"−{span(-seconds)}"
    if round(seconds * 1000) < 1000:
        return f"{round(seconds * 1000)} ms"
    if round(seconds, 1) < 60:
        return f"{round(seconds, 1):g} s"
    left, parts = round(seconds), list[str]()
    for size, unit in _UNITS:
        number, left = divmod(left, size)
        if number:
            parts.append(f"{number} {unit}")
        if len(parts) == 2 or (parts and not number):
            break
    return " ".join(parts)


def between(earlier: datetime, later: datetime) -> str:
    """Return the duration in its largest unit: ``42 s``, ``7 min``, ``3 h``, ``2 d``; hours and minutes from two on."""
    # `console.js` does the same.
    seconds = abs((later - earlier).total_seconds())
    size, unit = next(
        (size, unit) for size, unit in _UNITS if seconds >= size * (2 if unit in ("h", "min") else 1) or unit == "s"
    )
    return f"{int(seconds // size)} {unit}"


def age(value: Time, now: Time) -> str:
    """Return how far from `now` a time is, or ``now`` within a second of it."""
    at, then = read(value), read(now)
    if at is None or then is None:
        return plain(value)
    return "now" if abs((then - at).total_seconds()) < 1 else between(at, then)


def ago(value: Time, now: Time) -> str:
    """Return ``7 min ago``, or ``in 7 min`` for a future time."""
    at, then, length = read(value), read(now), age(value, now)
    if at is None or then is None or length == "now":
        return length
    return f"in {length}" if at > then else f"{length} ago"


def near(value: Time, now: Time) -> str:
    """Return ``23:57Z (in 12 min)``. From a day on it has its date."""
    at, then = read(value), read(now)
    if at is None:
        return plain(value)
    is_far = then is not None and abs(at - then) >= timedelta(days=1)
    return f"{at.astimezone(UTC):{'%Y-%m-%d %H:%MZ' if is_far else '%H:%MZ'}} ({ago(at, now)})"
