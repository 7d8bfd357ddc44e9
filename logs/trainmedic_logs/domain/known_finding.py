"""Finding as the server knows it, merged from all streams.

The identity is rule, target, labels, and whether a job could have printed the line; never the rank.
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

MOST_LINES = 1_000_000_000_000_000_000  # fits a 64-bit column


class FindingEnd(StrEnum):
    ENDED = "ended"
    """Reported by all its streams."""
    SILENCE = "silence"
    """No line for the rule's silence."""
    BOOT = "boot"  # the node was booted later
    ATTEMPT = "attempt"
    """A later attempt began, or the job progressed."""
    UNCONFIRMED = "unconfirmed"
    FORGOTTEN = "forgotten"
    """Not received for a week (`finding_ends.end_of`)."""


class EpisodeKey(NamedTuple):
    node: str
    id: str
    """`Finding.id`."""


class Episode(Struct, frozen=True):
    """Part of a finding that one stream reports."""

    key: EpisodeKey
    finding_id: str
    count: int
    """Lines reported by the stream."""
    counted_before: int = 0
    """Those of them that belong to an earlier, ended finding."""
    is_over: bool = False


class FindingAlert(Struct, frozen=True):
    labels: Mapping[str, str]
    """Constant, because they identify the alert."""
    fingerprint: str
    starts_at: datetime
    summary: str = ""
    description: str = ""


class KnownFinding(Struct, frozen=True):
    """Times are UTC."""

    id: str
    rule: str
    role: Role
    cause: CauseClass
    target: Target
    origin: Origin
    """Origin of the first line. Its job is proven or None."""
    line: str
    first_at: datetime
    last_at: datetime
    """First and last line, by the nodes' clocks."""
    heard_first_at: datetime
    heard_at: datetime
    """First and last receipt of news by the server."""
    labels: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    ranks: frozenset[int] = frozenset()
    nodes: frozenset[str] = frozenset()  # whose agents reported it
    count: int = 0  # lines of all streams
    time_source: TimeSource = TimeSource.ARRIVAL
    clock_error: float = 0.0
    """Seconds, on the first line's node."""
    shape: str = ""
    is_printed: bool = False
    """A job could have printed it, so it proves nothing about a node."""
    ended_at: datetime | None = None
    ended_because: FindingEnd | None = None
    is_suspected: bool = False
    """Its alert waits for confirmation."""
    confirmed_by: str = ""
    """Name of a rule or alert."""
    alert: FindingAlert | None = None
    no_alert_because: str = ""
    """Reason for people; empty if it raises an alert."""
    tell_at: datetime | None = None
    """When its alert, or its end, is sent next; None for never."""

    @property
    def key(self) -> str:
        return identity_of(self.rule, self.target, self.labels, is_printed=self.is_printed)

    @property
    def claimed_job(self) -> str:
        """Job named only by its log file, or ""."""
        return self.labels.get(CLAIMED_JOB, "")

    @property
    def is_open(self) -> bool:
        return self.ended_at is None

    @property
    def as_finding(self) -> Finding:
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
    finding_id: str
    key: EpisodeKey
    source: str
    stream: str
    rank: int | None
    first_at: datetime
    excerpt: Excerpt


class KeptJob(Struct, frozen=True):
    """Job whose findings and verdicts are retained at any age."""

    job: str
    attempt: int | None
    """None for all attempts."""
    by: str
    at: datetime
    note: str = ""


class JobPlace(NamedTuple):
    job: str
    node: str


def identity_of(rule: str, target: Target, labels: Mapping[str, str], *, is_printed: bool) -> str:
    """Return the identity. Printable and kernel findings differ, so that neither poses as the other."""
    parts: list[object] = [rule, target.key, sorted(labels.items())]
    if is_printed is not (target.kind is TargetKind.JOB):  # omitted in the usual case
        parts.append(is_printed)
    return hashlib.sha256(json.dumps(parts).encode(errors="backslashreplace")).hexdigest()[:32]


def identity(finding: Finding) -> str:
    return identity_of(finding.rule, finding.target, finding.labels, is_printed=is_printed(finding))


def is_of_later_attempt(finding: Finding, earlier: KnownFinding) -> bool:
    """Requires equal identities, claimed job included."""
    attempt, before = finding.origin.attempt, earlier.origin.attempt
    is_same_job = finding.origin.job == earlier.origin.job and bool(earlier.origin.job or earlier.claimed_job)
    return is_same_job and attempt is not None and before is not None and attempt > before


def is_printed(finding: Finding) -> bool:
    return finding.origin.source not in KERNEL_SOURCES


def new_finding(finding_id: str, finding: Finding, now: datetime) -> KnownFinding:
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
        is_printed=is_printed(finding),  # `merge_update` adds count, ranks and node
    )


def merge_update(
    known: KnownFinding, before: Episode | None, key: EpisodeKey, finding: Finding, now: datetime
) -> tuple[KnownFinding, Episode]:
    """Merge a stream's update. Return both unchanged for a repeat."""
    earlier = before or Episode(key, known.id, 0)
    if earlier.finding_id != known.id:  # the stream's earlier finding is over
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
    # Further ranks are not listed.
    return union if len(union) <= MOST_RANKS else ranks
