"""Verdict as the server stores it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from msgspec import Struct

SLOW = "slow:"
"""Fingerprint prefix of slow jobs."""


class KnownVerdict(Struct, frozen=True):
    """Times are UTC."""

    id: str
    job: str
    attempt: int | None
    """From 1; None if unknown."""
    began_at: datetime
    """First sign received by the server."""
    made_at: datetime
    """Creation, or latest update: possible until two minutes after `began_at`, or after the job's reported end."""
    cause: str
    confidence: str
    node: str | None
    """Node at fault, only with high confidence."""
    fingerprint: str  # equal for the same cause and line
    plain: Mapping[str, Any]
    """`Verdict.plain`."""
    labels: Mapping[str, str] | None = None
    """None before the alert."""
    tell_at: datetime | None = None
    """When its alert is sent next; None for never."""

    @property
    def is_slow(self) -> bool:
        return self.fingerprint.startswith(SLOW)
