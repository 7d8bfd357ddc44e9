"""What was found out about why jobs failed: as the run store keeps it, and as reports need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from trainmedic_logs.domain.known_verdict import KnownVerdict


@dataclass(frozen=True, slots=True)
class VerdictRecord:
    """One failure of a job, or a time in which it was slow, and what is held to have caused it."""

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
    ranks: tuple[int, ...] = ()
    """Where it began, ascending."""
    is_slow: bool = False
    """The job had not failed: it was slower than it could be."""


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


class StoredVerdicts(Protocol):
    """The verdicts, within one transaction of the run store."""

    def of_job(self, job: str, limit: int) -> list[KnownVerdict]:
        """Return the job's verdicts, the newest first."""
        ...

    def on_node(self, node: str, since: datetime) -> list[KnownVerdict]:
        """Return the verdicts that name the node and began since then, the newest first; at most 100."""
        ...

    def to_tell(self, moment: datetime, limit: int) -> list[KnownVerdict]:
        """Return those whose alert is to be told by `moment`, in the order in which that became due."""
        ...

    def save(self, verdicts: Sequence[KnownVerdict]) -> None:
        """Insert or replace, by id."""
        ...


class VerdictHistory(VerdictSource, Protocol):
    """Reads verdicts, and never waits for a writer."""

    async def verdicts_of(self, job: str, limit: int) -> list[KnownVerdict]:
        """Return the job's verdicts, the newest first."""
        ...

    async def verdicts_on(self, node: str, since: datetime) -> list[KnownVerdict]:
        """Return the verdicts that name the node and began since then, the newest first; at most 100."""
        ...
