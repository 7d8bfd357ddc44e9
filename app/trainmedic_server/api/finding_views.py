"""API models of findings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from pydantic import Field

from trainmedic_logs.domain.finding import CLAIMED_JOB, CauseClass, Role, TimeSource
from trainmedic_logs.domain.finding_codec import write_ranks
from trainmedic_logs.domain.known_finding import FindingEnd, KnownExcerpt, KnownFinding
from trainmedic_server.api.view import View
from trainmedic_server.domain.alert import AlertRecord
from trainmedic_server.domain.own_source import LOG, SOURCE
from trainmedic_server.ports.findings import FindingHistory, FindingRecord

_MOST_OF_RUN = 5  # findings shown with a run


class FindingAlertView(View):
    labels: dict[str, str]
    fingerprint: str
    starts_at: datetime
    summary: str
    description: str


class FindingView(View):
    id: str
    rule: str
    role: Role
    cause: CauseClass
    target: str = Field(description="Such as gpu:node-1/GPU-5f3a, node:node-1, job:llm-1.")
    node: str | None = Field(description="The target's node.")
    gpu: str | None = Field(description="The target's GPU.")
    job: str | None = Field(description="The target's job, or else the job whose log has it.")
    claimed_job: str | None = Field(
        description="Job named only by the log file. This is not proven, and no playbook uses it."
    )
    attempt: int | None = Field(description="The job's attempt, from 1.")
    source: str = Field(description="training, launcher, kernel, slurm, fabric-manager, or a name of the agent's.")
    stream: str = Field(description="Source of its first line, usually a file on the node.")
    nodes: list[str] = Field(description="Nodes on which its lines were read.")
    line: str = Field(description="The first line, masked.")
    labels: dict[str, str] = Field(description="Labels that the rule adds to the alert.")
    fields: dict[str, str] = Field(description="Values that the pattern extracted from the line.")
    count: int = Field(description="Number of lines in all streams.")
    ranks: str = Field(description="Ranks that printed it, as spans.", examples=["0-511"])
    first_at: datetime
    last_at: datetime
    time_source: TimeSource
    clock_error: float = Field(description="Possible error of the node's clock in seconds.")
    heard_first_at: datetime
    heard_at: datetime
    open: bool = Field(description="Whether it has not ended.")
    ended_at: datetime | None
    ended_because: FindingEnd | None
    suspected: bool = Field(description="Whether it waits for a confirmation, or never got one.")
    confirmed_by: str | None = Field(description="The rule or alert that confirmed it.")
    alert: FindingAlertView | None
    no_alert_because: str | None


class FindingPage(View):
    items: list[FindingView]
    next: str | None = Field(description="Cursor of the next page; null on the last.")


class ExcerptView(View):
    node: str
    source: str
    stream: str
    rank: int | None
    first_at: datetime
    lines: list[str]
    at: int = Field(description="Index of the finding's first line in `lines`.")
    number: int = Field(description="Line number of the first line in the stream, from 1; 0 if unknown.")


class FindingDetail(FindingView):
    excerpts: list[ExcerptView]
    kept: bool = Field(description="Whether it is locked against deletion.")


class RunFinding(FindingView):
    excerpt: ExcerptView | None


def finding(known: KnownFinding) -> FindingView:
    return FindingView.of(known, **_members(known))


def page(newest_first: Sequence[KnownFinding], cursor: str | None) -> FindingPage:
    return FindingPage(items=[finding(known) for known in newest_first], next=cursor)


def detail(record: FindingRecord) -> FindingDetail:
    excerpts = [_excerpt(known) for known in record.excerpts]
    return FindingDetail.of(record.finding, **_members(record.finding), excerpts=excerpts, kept=record.is_kept)


async def of_run(findings: FindingHistory, alerts: Collection[AlertRecord]) -> list[RunFinding]:
    """Return the first findings that raised these alerts, each with an excerpt if it has one."""
    of_logs = dict.fromkeys(record.alert.identity for record in alerts if record.alert.labels.get(SOURCE) == LOG)
    fingerprints = list(dict.fromkeys(each.fingerprint for each in of_logs))
    views: list[RunFinding] = []
    for known in await findings.findings_of_alerts(fingerprints) if of_logs else ():
        if known.alert is None or (known.alert.fingerprint, known.alert.starts_at) not in of_logs:
            continue
        record = await findings.finding(known.id)
        if record is not None:
            first = _excerpt(record.excerpts[0]) if record.excerpts else None
            views.append(RunFinding.of(known, **_members(known), excerpt=first))
        if len(views) == _MOST_OF_RUN:
            break
    return views


def _members(known: KnownFinding) -> dict[str, Any]:
    """Return the members that are no attributes of the finding."""
    target, origin = known.target, known.origin
    return {
        "target": target.key,
        **target.parts,
        "job": target.job or origin.job,
        "claimed_job": known.claimed_job or None,
        "attempt": origin.attempt,
        "source": origin.source,
        "stream": origin.stream,
        "nodes": sorted(known.nodes),
        "labels": {name: value for name, value in known.labels.items() if name != CLAIMED_JOB},
        "ranks": write_ranks(known.ranks),
        "open": known.is_open,
        "suspected": known.is_suspected,
        "confirmed_by": known.confirmed_by or None,
        "no_alert_because": known.no_alert_because or None,
    }


def _excerpt(known: KnownExcerpt) -> ExcerptView:
    excerpt = known.excerpt
    return ExcerptView.of(known, node=known.key.node, lines=excerpt.lines, at=excerpt.at, number=excerpt.number)
