"""What was found out about why jobs failed, as reports need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol


@dataclass(frozen=True, slots=True)
class VerdictRecord:
    """One failure of a job and what is held to have caused it."""

    job: str
    at: datetime
    """When the job failed (aware UTC)."""
    cause: str
    """The class of the cause, such as ``gpu`` or ``storage``; ``unknown`` is one."""
    confidence: str
    """``high``, ``medium`` or ``low``."""
    node: str | None = None
    """Named with high confidence alone."""
    gpu: str | None = None
    summary: str = ""
    """One sentence for a person."""
    advice: str = ""


class VerdictSource(Protocol):
    """Where verdicts are kept."""

    async def verdicts(self, since: datetime, until: datetime, job: str | None = None) -> Sequence[VerdictRecord]:
        """Return those on failures from `since` to before `until`, of this job or of all, oldest first.

        Raises StoreUnavailable.
        """
        ...


class NoVerdicts:
    """Of a server that diagnoses nothing."""

    async def verdicts(self, since: datetime, until: datetime, job: str | None = None) -> Sequence[VerdictRecord]:
        return ()
