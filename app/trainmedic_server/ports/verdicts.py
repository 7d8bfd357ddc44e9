"""Stored verdicts on jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from trainmedic_logs.domain.known_verdict import KnownVerdict


@dataclass(frozen=True, slots=True)
class VerdictRecord:
    """A failure or slow period of a job, and its attributed cause."""

    job: str
    at: datetime  # First sign that the server received (aware UTC).
    cause: str
    confidence: str
    node: str | None = None  # Set only with high confidence.
    gpu: str | None = None
    summary: str = ""
    advice: str = ""
    ranks: tuple[int, ...] = ()
    is_slow: bool = False  # True for a slow period, False for a failure.


class VerdictSource(Protocol):
    async def verdicts(self, since: datetime, until: datetime, job: str | None = None) -> Sequence[VerdictRecord]:
        """Return verdicts that began from `since` to before `until`, oldest first; `job` None selects all jobs. Raises
        StoreUnavailable.
        """
        ...


class NoVerdicts:
    async def verdicts(self, since: datetime, until: datetime, job: str | None = None) -> Sequence[VerdictRecord]:
        return ()


class StoredVerdicts(Protocol):
    def of_job(self, job: str, limit: int, *, is_slow: bool) -> list[KnownVerdict]:
        """Return the newest, newest first."""
        ...

    def on_node(self, node: str, since: datetime) -> list[KnownVerdict]:
        """Return, newest first, the last verdict of at most 100 jobs that names the node, from `since` on."""
        ...

    def to_tell(self, moment: datetime, limit: int) -> list[KnownVerdict]:
        """Return verdicts whose alert is due, earliest first."""
        ...

    def save(self, verdicts: Sequence[KnownVerdict]) -> None: ...


class VerdictHistory(VerdictSource, Protocol):
    async def verdicts_of(self, job: str, limit: int, attempt: int | None = None) -> list[KnownVerdict]: ...

    async def verdicts_on(self, node: str, since: datetime) -> list[KnownVerdict]: ...
