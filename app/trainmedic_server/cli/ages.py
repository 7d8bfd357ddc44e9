"""Times as people read them at a glance: how long ago, or how long until then. Pure."""

from __future__ import annotations

from datetime import datetime

from trainmedic_server.cli.table import plain

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def between(earlier: datetime, later: datetime) -> str:
    """How long it is from one to the other, in its largest unit: ``now``, ``42 s``, ``7 min``, ``3 h``, ``2 d``."""
    seconds = abs((later - earlier).total_seconds())
    for size, name in _UNITS:
        if seconds >= size * (2 if name in ("h", "min") else 1):
            return f"{int(seconds // size)} {name}"
    return "now"


def age(text: str | None, at: str) -> str:
    """How long before `at` the RFC 3339 time `text` was, without a word beside it."""
    try:
        return between(datetime.fromisoformat(text or ""), datetime.fromisoformat(at))
    except ValueError:
        return plain(text)


def ago(text: str | None, at: str) -> str:
    """As ``7 min ago``, or ``in 7 min`` where it is yet to come."""
    try:
        when, now = datetime.fromisoformat(text or ""), datetime.fromisoformat(at)
    except ValueError:
        return plain(text)
    length = between(when, now)
    if length == "now":
        return length
    return f"in {length}" if when > now else f"{length} ago"


def moment(text: str | None, at: str) -> str:
    """A time of day in UTC, and how far away it is: ``23:57Z (in 12 min)``."""
    try:
        when = datetime.fromisoformat(text or "")
    except ValueError:
        return plain(text)
    return f"{when:%H:%M}Z ({ago(text, at)})"
