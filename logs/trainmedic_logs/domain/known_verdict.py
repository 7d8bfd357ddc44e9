"""The verdict on one failure of a job, as the server keeps it. Who makes them: ``engine.job_diagnoses``."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from msgspec import Struct

SLOW = "slow:"
"""How the fingerprint of a verdict on a slow job begins."""


class KnownVerdict(Struct, frozen=True):
    """One verdict. Times are aware UTC."""

    id: str
    job: str
    attempt: int | None
    """Of the job, counted from 1; None where nobody says it."""
    began_at: datetime
    """When the server heard the first sign of the failure."""
    made_at: datetime
    """When it was made last: what comes within two minutes is taken in."""
    cause: str
    confidence: str
    node: str | None
    """The node that is at fault; only with high confidence."""
    fingerprint: str
    plain: Mapping[str, Any]
    """All of it, as it stands in JSON: `trainmedic_logs.diagnosis.verdict.Verdict.plain`."""
    labels: Mapping[str, str] | None = None
    """Of the alert that it raised; they stay what they were. None before."""
    tell_at: datetime | None = None
    """When its alert is to be told next; None where there is nothing to tell."""

    @property
    def is_slow(self) -> bool:
        """Whether it is on a job that goes on slower than it could, and on no failure."""
        return self.fingerprint.startswith(SLOW)
