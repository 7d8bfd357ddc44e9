"""Counts of a job's out-of-memory and network errors, from the findings in its logs.

Lower bounds: findings at most a minute apart, and all errors within one finding, are one event.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from trainmedic_logs.domain.finding import CauseClass, Role
from trainmedic_logs.domain.known_finding import KnownFinding
from trainmedic_server.ports.verdicts import VerdictRecord
from trainmedic_server.reports.failures import FailureRecord

OUT_OF_MEMORY = frozenset({CauseClass.GPU_MEMORY, CauseClass.HOST_MEMORY})
NETWORK = frozenset({CauseClass.NETWORK})
MOST_LISTED = 50
MOST_RANKS = 64
NOTHING_READ = (
    "no agent has reported a finding of this job in that time: nothing was found in its log, or its log is not read"
)
_SAME_EVENT = timedelta(minutes=1)
_FAILURE_AFTER = timedelta(minutes=2)
"""A failure of the same cause within this time is attributed to the event."""
_COUNTED = frozenset({Role.ROOT, Role.CONFIRMATION})
"""Roles of findings that are more than the consequence of another failure."""


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    at: datetime
    until: datetime  # Time of the last line; ``at`` is that of the first.
    causes: tuple[str, ...]
    ranks: tuple[int, ...]  # The lowest `MOST_RANKS`; empty if the lines name none.
    rank_count: int
    nodes: tuple[str, ...]  # At most `MOST_RANKS`.
    rules: tuple[str, ...]
    lines: int
    ended_job: bool | None
    """True if the job failed with this cause, from a minute before the first line to two after the last. False: no
    failure, or another cause. None: unknown.
    """


@dataclass(frozen=True, slots=True)
class ErrorCount:
    count: int
    fatal: int  # Events known to have ended the job.
    events: tuple[ErrorEvent, ...]  # The newest `MOST_LISTED`, oldest first.


def error_count(
    causes: frozenset[CauseClass],
    findings: Sequence[KnownFinding],
    failures: Sequence[FailureRecord],
    are_failures_known: bool,
) -> ErrorCount:
    """Count groups of findings, and diagnosed failures without one.

    `are_failures_known`: the job's processes or launcher reported something, so a failure would be known.
    """
    counted = [each for each in findings if each.cause in causes and each.role in _COUNTED and not each.is_suspected]
    events = [_event(group, failures, are_failures_known) for group in _groups(counted)]
    without_finding = [failure for failure in failures if not any(_may_end(event, failure) for event in events)]
    events += [
        _event_of_verdict(failure.verdict, failure.at)
        for failure in without_finding
        if failure.verdict is not None and failure.verdict.cause in causes
    ]
    events.sort(key=lambda event: event.at)
    return ErrorCount(len(events), sum(event.ended_job is True for event in events), tuple(events[-MOST_LISTED:]))


def _event_of_verdict(verdict: VerdictRecord, at: datetime) -> ErrorEvent:
    return ErrorEvent(
        at=at,
        until=at,
        causes=(verdict.cause,),
        ranks=verdict.ranks,
        rank_count=len(verdict.ranks),
        nodes=() if verdict.node is None else (verdict.node,),
        rules=(),
        lines=0,
        ended_job=True,
    )


def _groups(findings: Sequence[KnownFinding]) -> Iterator[list[KnownFinding]]:
    group: list[KnownFinding] = []
    for each in sorted(findings, key=lambda finding: (finding.first_at, finding.id)):
        if group and each.first_at > max(known.last_at for known in group) + _SAME_EVENT:
            yield group
            group = []
        group.append(each)
    if group:
        yield group


def _event(group: Sequence[KnownFinding], failures: Sequence[FailureRecord], are_failures_known: bool) -> ErrorEvent:
    ranks = sorted(frozenset().union(*(each.ranks for each in group)))
    causes = {each.cause.value for each in group}
    event = ErrorEvent(
        at=group[0].first_at,
        until=max(each.last_at for each in group),
        causes=tuple(sorted(causes)),
        ranks=tuple(ranks[:MOST_RANKS]),
        rank_count=len(ranks),
        nodes=tuple(sorted(frozenset().union(*(each.nodes for each in group)))[:MOST_RANKS]),
        rules=tuple(sorted({each.rule for each in group})),
        lines=sum(each.count for each in group),
        ended_job=False if are_failures_known else None,
    )
    near = [failure for failure in failures if _may_end(event, failure)]
    if not near:
        return event
    verdicts = [failure.verdict.cause for failure in near if failure.verdict is not None]
    if causes & set(verdicts):
        return replace(event, ended_job=True)
    is_known = len(verdicts) == len(near) and CauseClass.UNKNOWN.value not in verdicts
    return replace(event, ended_job=False if is_known else None)


def _may_end(event: ErrorEvent, failure: FailureRecord) -> bool:
    return event.at - _SAME_EVENT <= failure.at <= event.until + _FAILURE_AFTER
