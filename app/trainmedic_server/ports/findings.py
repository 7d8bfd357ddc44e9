"""Stored findings, and senders of their alerts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Protocol, TypeAlias

from msgspec import Struct

from trainmedic_logs.domain.finding import Role
from trainmedic_logs.domain.finding_codec import FindingUpdate
from trainmedic_logs.domain.known_finding import Episode, EpisodeKey, JobPlace, KeptJob, KnownExcerpt, KnownFinding
from trainmedic_server.domain.alert import Alert

TakeUpdates: TypeAlias = Callable[[Sequence[FindingUpdate]], Awaitable[None]]
"""Stores updates in order; returns when they are durable. After StoreUnavailable they are delivered again."""


class FindingRecords(Protocol):
    def with_ids(self, ids: Collection[str]) -> dict[str, KnownFinding]: ...
    def open_with(self, keys: Collection[str]) -> dict[str, KnownFinding]:
        """Return open findings by `KnownFinding.key`, at most one each."""
        ...

    def all_open(self) -> list[KnownFinding]: ...

    def to_tell(self, moment: datetime, limit: int) -> list[KnownFinding]:
        """Return findings whose alert is due, earliest first."""
        ...

    def save(self, findings: Sequence[KnownFinding]) -> None:
        """The transaction raises Conflict if a key would have two open findings."""
        ...

    def episodes(self, keys: Collection[EpisodeKey]) -> dict[EpisodeKey, Episode]: ...
    def save_episodes(self, episodes: Sequence[Episode], at: datetime) -> None: ...  # `at`: when reported
    def ids_with_open_episodes(self, ids: Collection[str]) -> set[str]:
        """Return IDs of findings with a stream that has not ended."""
        ...

    def excerpt_counts(self, ids: Collection[str]) -> dict[str, int]: ...
    def save_excerpts(self, excerpts: Sequence[KnownExcerpt]) -> None: ...

    def keep_job(self, kept: KeptJob) -> None:
        """Exclude the job's findings, those on its nodes, and its verdicts from pruning."""
        ...

    def release_job(self, job: str, attempt: int | None) -> bool:
        """Undo `keep_job` with the same arguments. Return False if there was none."""
        ...

    def kept_jobs(self) -> list[KeptJob]: ...
    def job_places(self) -> Mapping[JobPlace, datetime]:
        """Return when each job was last seen on each node."""
        ...

    def save_job_places(self, places: Mapping[JobPlace, datetime]) -> None: ...


class FindingFilter(Struct, frozen=True):
    """None matches any. ``since`` matches findings with a line or a report at that time or later."""

    job: str | None = None
    node: str | None = None  # Node of the target, or whose agent reported it.
    rule: str | None = None
    role: Role | None = None
    since: datetime | None = None
    suspected: bool | None = None
    open: bool | None = None
    claimed_job: str | None = None  # Job named only by the log file, as `KnownFinding.claimed_job`.


class FindingRecord(Struct, frozen=True):
    finding: KnownFinding
    excerpts: tuple[KnownExcerpt, ...]
    is_kept: bool = False  # Excluded from pruning by a `KeptJob`.


class FindingHistory(Protocol):
    async def findings_page(
        self, matching: FindingFilter, limit: int, cursor: str | None
    ) -> tuple[list[KnownFinding], str | None]:
        """Return at most `limit` findings, newest first, and the next page's cursor, if any. Raises ValueError on an
        invalid cursor.
        """
        ...

    async def finding(self, finding_id: str) -> FindingRecord | None: ...
    async def findings_of_alerts(self, fingerprints: Collection[str]) -> list[KnownFinding]:
        """Return the newest 200 findings that raised one of the first 200 of these alerts, oldest first."""
        ...

    async def alerts_raised(self, fingerprints: Collection[str]) -> list[Mapping[str, str]]:
        """Return the labels of those alerts that findings raised, in no order."""
        ...

    async def kept_jobs(self) -> list[KeptJob]: ...


class AlertSender(Protocol):
    async def tell(self, alerts: Sequence[Alert]) -> None:
        """Send alerts; return when they are accepted. After TrainmedicError, retry: repeats are harmless."""
        ...
