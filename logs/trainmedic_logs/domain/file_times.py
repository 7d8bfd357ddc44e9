"""Times of files within bounds. The owner of a file can set any time that the file system stores."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

_LATEST = 2**63 - 1
"""Nanoseconds since 1970, in the year 2262. Messages, databases and ``datetime`` hold this number."""


def written_ns(facts: os.stat_result) -> int:
    """Return the time of a file's last write in nanoseconds since 1970, from 0 to `_LATEST`."""
    return max(0, min(facts.st_mtime_ns, _LATEST))


def written_at(facts: os.stat_result) -> datetime:
    """Return the same as a time, UTC."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=written_ns(facts) // 1000)
