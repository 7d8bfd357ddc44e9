"""File times within bounds: owners can set any."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

# Fits messages, databases and ``datetime``.
_LATEST = 2**63 - 1


def written_ns(facts: os.stat_result) -> int:
    """Return the last write in ns since 1970, from 0 to `_LATEST`."""
    return max(0, min(facts.st_mtime_ns, _LATEST))


def written_at(facts: os.stat_result) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=written_ns(facts) // 1000)
