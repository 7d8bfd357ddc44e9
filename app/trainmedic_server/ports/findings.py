"""Findings in the run store, and where updates of them come from."""

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
"""Returns once what the updates say is durable, in order. Raises StoreUnavailable; then the same come again."""


class FindingRecords(Protocol):
    """The findings, within one transaction of the run store."""

    def with_ids(self, ids: Collection[str]) -> dict[str, KnownFinding]: ...
    def open_with(self, keys: Collection[str]) -> dict[str, KnownFinding]:
        """Return the findings that are not over, by `KnownFinding.key`; of one key there is one at most."""
        ...

    def all_open(self) -> list[KnownFinding]:
        """Return the findings that are not over, oldest first."""
        ...

    def to_tell(self, moment: datetime, limit: int) -> list[KnownFinding]:
        """Return those whose alert is to be told by `moment`, in the order in which that became due."""
        ...

    def save(self, findings: Sequence[KnownFinding]) -> None:
        """Insert or replace, by id. The unit raises Conflict where two of a key would be open."""
        ...

    def episodes(self, keys: Collection[EpisodeKey]) -> dict[EpisodeKey, Episode]: ...
    def save_episodes(self, episodes: Sequence[Episode], at: datetime) -> None: ...
    def going_on(self, ids: Collection[str]) -> set[str]:
        """Return those of these findings that have an episode which is not over."""
        ...

    def excerpt_counts(self, ids: Collection[str]) -> dict[str, int]: ...
    def save_excerpts(self, excerpts: Sequence[KnownExcerpt]) -> None:
        """Insert or replace, by finding and episode."""
        ...

    def keep_job(self, kept: KeptJob) -> None: ...
    def release_job(self, job: str, attempt: int | None) -> bool:
        """Return whether it was kept."""
        ...

    def kept_jobs(self) -> list[KeptJob]: ...
    def job_places(self) -> Mapping[JobPlace, datetime]:
        """Return when each job was last on each node."""
        ...

    def save_job_places(self, places: Mapping[JobPlace, datetime]) -> None: ...


class FindingFilter(Struct, frozen=True):
    """Which findings are meant; None means any. ``since`` asks for those with a line, or heard of, from then on."""

    job: str | None = None
    node: str | None = None
    """Its target is on the node, or one of its lines was read there."""
    rule: str | None = None
    role: Role | None = None
    since: datetime | None = None
    suspected: bool | None = None
    open: bool | None = None
    claimed_job: str | None = None
    """The job that only a log file names: `KnownFinding.claimed_job`."""


class FindingRecord(Struct, frozen=True):
    """A finding with its excerpts, the earliest first."""

    finding: KnownFinding
    excerpts: tuple[KnownExcerpt, ...]
    is_kept: bool = False
    """Whether somebody has locked what is known of its job."""


class FindingHistory(Protocol):
    """Reads findings, and never waits for a writer."""

    async def findings_page(
        self, matching: FindingFilter, limit: int, cursor: str | None
    ) -> tuple[list[KnownFinding], str | None]:
        """Return at most `limit` findings, the newest first, and the cursor of the next page or None.

        Raises ValueError on a cursor that is not one.
        """
        ...

    async def finding(self, finding_id: str) -> FindingRecord | None: ...
    async def findings_of_alerts(self, fingerprints: Collection[str]) -> list[KnownFinding]:
        """Return the findings that raised these alerts, oldest first; at most 200."""
        ...

    async def alerts_raised(self, fingerprints: Collection[str]) -> list[Mapping[str, str]]:
        """Return the labels of the alerts with these fingerprints that findings have raised, each once."""
        ...

    async def kept_jobs(self) -> list[KeptJob]: ...


class AlertSender(Protocol):
    """Whoever takes the alerts of findings: the Alertmanager, or the intake itself."""

    async def tell(self, alerts: Sequence[Alert]) -> None:
        """Return once they are taken. Telling one again changes nothing. Raises TrainmedicError, and then they are to
        be told again."""
        ...
