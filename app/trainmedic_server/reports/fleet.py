"""The report over all jobs: why they failed and what that cost, which nodes keep failing, what repairs came to. Pure.

It rests on the run store alone, so it covers the time that the store keeps.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from trainmedic_server.domain.run import Event, Run, Status
from trainmedic_server.domain.target import TargetKind
from trainmedic_server.ports.verdicts import VerdictRecord
from trainmedic_server.reports.failures import FAILED, GONE, FailureRecord, failures_of
from trainmedic_server.reports.job_report import TimeRange

MOST_NODES = 50
UNKNOWN = "unknown"
"""The cause of a failure on which there is no verdict."""


@dataclass(frozen=True, slots=True)
class CauseTotal:
    """The failures of one cause."""

    cause: str
    failures: int
    jobs: int
    down_seconds: float
    """Until the jobs were started again; of those that were not, nothing is counted."""
    lost_gpu_hours: float | None
    """That time by the ranks that each job had, a GPU each; None where the ranks of none of them are known."""
    uncounted: int
    """Failures without known ranks, or after which the job did not come back: nothing of them is in the hours."""


@dataclass(frozen=True, slots=True)
class NodeTotal:
    """How often one node was in trouble."""

    node: str
    alerts: int
    """Alerts on it, or on a GPU in it, that a playbook reacts to."""
    alert_names: tuple[str, ...]
    verdicts: int
    """Failures of jobs that were put down to it with high confidence."""
    jobs: tuple[str, ...]
    """Those jobs."""
    touched: int
    """Runs that have changed something on it."""


@dataclass(frozen=True, slots=True)
class RepairTotal:
    """What the runs of one playbook came to."""

    playbook: str
    runs: int
    succeeded: int
    failed: int
    observed: int
    """Runs that only recorded what they would do."""
    open: int
    median_seconds: float | None
    """From the admission to the end, of those that succeeded."""


@dataclass(frozen=True, slots=True)
class FleetReport:
    time_range: TimeRange
    failures: int
    causes: tuple[CauseTotal, ...]
    """Those that cost most first."""
    nodes: tuple[NodeTotal, ...]
    """Those with two troubles or more, the worst first."""
    repairs: tuple[RepairTotal, ...]
    unknown: Mapping[str, str]
    """Why a part is empty, or incomplete, by its name."""


@dataclass(slots=True)
class _Node:
    alerts: set[object] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    jobs: list[str] = field(default_factory=list)
    touched: int = 0


def fleet_report(
    since: datetime,
    until: datetime,
    events: Sequence[Event],
    runs: Sequence[Run],
    verdicts: Sequence[VerdictRecord],
    left_out: str | None = None,
) -> FleetReport:
    """The report on all jobs from `since` to `until`. `left_out` says what was too much to be read."""
    failures = list(_all_failures(events, verdicts))
    unknown = {}
    if failures and not verdicts:
        unknown["causes"] = "no failure was diagnosed in that time"
    if left_out is not None:
        unknown["repairs"] = left_out
    return FleetReport(
        TimeRange(since, until),
        len(failures),
        tuple(_causes(failures)),
        tuple(_nodes(runs, verdicts)),
        tuple(_repairs(runs)),
        unknown,
    )


def _all_failures(
    events: Sequence[Event], verdicts: Sequence[VerdictRecord]
) -> Iterable[tuple[str, FailureRecord, int | None]]:
    """Each failure with its job, and how many ranks the job had."""
    by_job: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_job[str(event.data.get("job", ""))].append(event)
    for job, of_job in by_job.items():
        on_job = [verdict for verdict in verdicts if verdict.job == job]
        ranks = {event.at: event.data.get("ranks") for event in of_job if event.kind in (FAILED, GONE)}
        for failure in failures_of(of_job, on_job):
            known = ranks.get(failure.at)
            yield job, failure, known if isinstance(known, int) else None


def _causes(failures: Sequence[tuple[str, FailureRecord, int | None]]) -> list[CauseTotal]:
    by_cause: dict[str, list[tuple[str, FailureRecord, int | None]]] = defaultdict(list)
    for job, failure, ranks in failures:
        by_cause[failure.verdict.cause if failure.verdict else UNKNOWN].append((job, failure, ranks))
    totals = [_cause(cause, of_cause) for cause, of_cause in by_cause.items()]
    return sorted(totals, key=lambda total: (-(total.lost_gpu_hours or 0.0), -total.failures, total.cause))


def _cause(cause: str, failures: Sequence[tuple[str, FailureRecord, int | None]]) -> CauseTotal:
    costs = [
        failure.down_seconds * ranks / 3600
        for _, failure, ranks in failures
        if failure.down_seconds is not None and ranks is not None
    ]
    return CauseTotal(
        cause=cause,
        failures=len(failures),
        jobs=len({job for job, _, _ in failures}),
        down_seconds=sum(failure.down_seconds or 0.0 for _, failure, _ in failures),
        lost_gpu_hours=round(sum(costs), 3) if costs else None,
        uncounted=len(failures) - len(costs),
    )


def _nodes(runs: Sequence[Run], verdicts: Sequence[VerdictRecord]) -> list[NodeTotal]:
    nodes: dict[str, _Node] = defaultdict(_Node)
    for run in runs:
        target = run.target
        if target is not None and target.node is not None and target.kind in (TargetKind.NODE, TargetKind.GPU):
            nodes[target.node].alerts.add(run.alert)
            nodes[target.node].names.add(run.alert_name)
        for node in run.touched:
            nodes[node].touched += 1
    for verdict in verdicts:
        if verdict.node is not None:
            nodes[verdict.node].jobs.append(verdict.job)
    totals = [
        NodeTotal(
            name,
            len(node.alerts),
            tuple(sorted(node.names)),
            len(node.jobs),
            tuple(sorted(set(node.jobs))),
            node.touched,
        )
        for name, node in nodes.items()
        if len(node.alerts) + len(node.jobs) >= 2
    ]
    return sorted(totals, key=lambda total: (-total.verdicts, -total.alerts, total.node))[:MOST_NODES]


def _repairs(runs: Sequence[Run]) -> list[RepairTotal]:
    by_playbook: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if run.status is not Status.NOT_STARTED:
            by_playbook[run.playbook].append(run)
    return [_repair_total(name, of_playbook) for name, of_playbook in sorted(by_playbook.items())]


def _repair_total(playbook: str, runs: Sequence[Run]) -> RepairTotal:
    succeeded = [run for run in runs if run.status is Status.SUCCEEDED]
    lengths = [(run.ended_at - run.created_at).total_seconds() for run in succeeded if run.ended_at is not None]
    observed = sum(run.status is Status.OBSERVED for run in runs)
    still_open = sum(run.is_open for run in runs)
    return RepairTotal(
        playbook=playbook,
        runs=len(runs),
        succeeded=len(succeeded),
        failed=len(runs) - len(succeeded) - observed - still_open,
        observed=observed,
        open=still_open,
        median_seconds=statistics.median(lengths) if lengths else None,
    )
