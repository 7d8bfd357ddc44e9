"""A finding as the server knows it: what all streams say of one thing that a rule has found about one target.

Its identity is the rule, the target, the rule's own labels, and whether a kernel wrote it or anybody could have printed
it; never the rank: of 512 ranks that print the same, there is one. Each stream speaks of its own *episode*, by an id of
its own, and says all that it knows with each update, so an update that comes twice, or late, changes nothing.

Pure. Who calls it: ``engine.finding_intake``. Not here: when somebody is told (``engine.finding_alerts``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.domain.finding import CLAIMED_JOB, CauseClass, Excerpt, Finding, Origin, Role, TimeSource
from trainmedic_logs.domain.finding_codec import MOST_RANKS
from trainmedic_logs.domain.log_sources import KERNEL_SOURCES

MOST_LINES = 1_000_000_000_000_000_000
"""How far lines are counted; no database counts ten times further."""


class FindingEnd(StrEnum):
    """Why a finding is over."""

    ENDED = "ended"
    """The rule's end was read in every stream that spoke of it."""
    SILENCE = "silence"
    """No line came for as long as the rule says."""
    BOOT = "boot"
    """The node was booted again."""
    ATTEMPT = "attempt"
    """The job's next attempt makes progress, or the job has ended."""
    UNCONFIRMED = "unconfirmed"
    """Nothing confirmed it in time."""
    FORGOTTEN = "forgotten"
    """The node is not known any more."""


class EpisodeKey(NamedTuple):
    """Which stream of which node speaks, and from which line on."""

    node: str
    id: str
    """`Finding.id`."""


class Episode(Struct, frozen=True):
    """What one stream has said so far."""

    key: EpisodeKey
    finding_id: str
    count: int
    """Lines so far, by its latest update."""
    counted_before: int = 0
    """Those of them that count for an earlier finding, which was over."""
    is_over: bool = False


class FindingAlert(Struct, frozen=True):
    """The alert that a finding raises."""

    labels: Mapping[str, str]
    """All of them; they stay what they were when the finding began, for by them it is known."""
    fingerprint: str
    starts_at: datetime
    summary: str = ""
    description: str = ""


class KnownFinding(Struct, frozen=True):
    """One finding. Times are aware UTC."""

    id: str
    rule: str
    role: Role
    cause: CauseClass
    target: Target
    origin: Origin
    """The origin of the first line that was received. Its job is one that is known to be there, or None. `claimed_job`
    is the job that a file names without proof."""
    line: str
    first_at: datetime
    last_at: datetime
    """Of the first and the last line, by the clocks of the nodes."""
    heard_first_at: datetime
    heard_at: datetime
    """When the server heard of it first, and last."""
    labels: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    ranks: frozenset[int] = frozenset()
    nodes: frozenset[str] = frozenset()
    """On which nodes its lines were read."""
    count: int = 0
    time_source: TimeSource = TimeSource.ARRIVAL
    clock_error: float = 0.0
    """Seconds, of the node where the first line was read."""
    shape: str = ""
    is_printed: bool = False
    """Whoever trains could have printed it. Then it can be about a job; that it stands on a node proves nothing."""
    ended_at: datetime | None = None
    """When it was over; None while it is not."""
    ended_because: FindingEnd | None = None
    is_suspected: bool = False
    """Its rule asks for a confirmation, which has not come."""
    confirmed_by: str = ""
    """The rule or alert that has confirmed it."""
    alert: FindingAlert | None = None
    no_alert_because: str = ""
    """Why it raises none, for a person; empty where it raises one."""
    tell_at: datetime | None = None
    """When its alert is to be told next; None where there is nothing to tell."""

    @property
    def key(self) -> str:
        """Its identity: the same of two findings that are about the same."""
        return identity_of(self.rule, self.target, self.labels, is_printed=self.is_printed)

    @property
    def claimed_job(self) -> str:
        """The job that only its log file names. Empty if the job is known, or none is named."""
        return self.labels.get(CLAIMED_JOB, "")

    @property
    def is_open(self) -> bool:
        return self.ended_at is None

    @property
    def as_finding(self) -> Finding:
        """It as the diagnosis and templates see it: one finding, though it may be of many streams."""
        return Finding(
            id=self.id,
            rule=self.rule,
            role=self.role,
            cause=self.cause,
            target=self.target,
            origin=self.origin,
            first_at=self.first_at,
            last_at=self.last_at,
            line=self.line,
            labels=self.labels,
            fields=self.fields,
            ranks=self.ranks,
            count=self.count,
            time_source=self.time_source,
            clock_error=self.clock_error,
            is_over=not self.is_open,
            shape=self.shape,
        )


class KnownExcerpt(Struct, frozen=True):
    """The lines around the first line of one stream's episode."""

    finding_id: str
    key: EpisodeKey
    source: str
    stream: str
    rank: int | None
    first_at: datetime
    excerpt: Excerpt


class KeptJob(Struct, frozen=True):
    """What is known of a job is not deleted, however old it is."""

    job: str
    attempt: int | None
    """None for all of the job's attempts."""
    by: str
    at: datetime
    note: str = ""


class JobPlace(NamedTuple):
    """A job was on a node."""

    job: str
    node: str


def identity_of(rule: str, target: Target, labels: Mapping[str, str], *, is_printed: bool) -> str:
    """What two findings have in common that are about the same: 32 hexadecimal digits. What anybody could have printed
    and what a kernel wrote are two, or the one would count as the other."""
    parts: list[object] = [rule, target.key, sorted(labels.items())]
    # Nearly all are of a job that printed them, or of a machine whose kernel wrote them.
    parts += [is_printed] if is_printed is not (target.kind is TargetKind.JOB) else []
    return hashlib.sha256(json.dumps(parts).encode(errors="backslashreplace")).hexdigest()[:32]


def identity(finding: Finding) -> str:
    """`identity_of` a finding that a node tells of."""
    return identity_of(finding.rule, finding.target, finding.labels, is_printed=is_printed(finding))


def is_of_later_attempt(finding: Finding, earlier: KnownFinding) -> bool:
    """Return whether the finding is of a later attempt of the same job than `earlier`, so that `earlier` is over."""
    attempt, before = finding.origin.attempt, earlier.origin.attempt
    is_same_job = finding.origin.job == earlier.origin.job and bool(earlier.origin.job or earlier.claimed_job)
    return is_same_job and attempt is not None and before is not None and attempt > before


def is_printed(finding: Finding) -> bool:
    """Whether whoever trains could have printed its lines."""
    return finding.origin.source not in KERNEL_SOURCES


def begun(finding_id: str, finding: Finding, now: datetime) -> KnownFinding:
    """What is known of a finding of which nothing was heard before; `taken` adds what the update counts."""
    return KnownFinding(
        id=finding_id,
        rule=finding.rule,
        role=finding.role,
        cause=finding.cause,
        target=finding.target,
        origin=finding.origin,
        line=finding.line,
        first_at=finding.first_at,
        last_at=finding.last_at,
        heard_first_at=now,
        heard_at=now,
        labels=finding.labels,
        fields=finding.fields,
        time_source=finding.time_source,
        clock_error=finding.clock_error,
        shape=finding.shape,
        is_printed=is_printed(finding),
    )


def taken(
    known: KnownFinding, before: Episode | None, key: EpisodeKey, finding: Finding, now: datetime
) -> tuple[KnownFinding, Episode]:
    """What is known after an update of an episode, and the episode. The same update again changes nothing."""
    earlier = before or Episode(key, known.id, 0)
    if earlier.finding_id != known.id:  # what it belonged to was over, and it goes on
        earlier = Episode(key, known.id, earlier.count, counted_before=earlier.count)
    news = max(finding.count - earlier.count, 0)
    episode = replace(earlier, count=earlier.count + news, is_over=earlier.is_over or finding.is_over)
    merged = replace(
        known,
        first_at=min(known.first_at, finding.first_at),
        last_at=max(known.last_at, finding.last_at),
        ranks=_united(known.ranks, finding.ranks),
        nodes=known.nodes | {key.node},
        count=min(known.count + news, MOST_LINES),
    )
    if before is not None and merged == known and episode == before:
        return known, before
    return replace(merged, heard_at=now), episode


def _united(ranks: frozenset[int], others: frozenset[int]) -> frozenset[int]:
    union = ranks | others
    return union if len(union) <= MOST_RANKS else ranks
