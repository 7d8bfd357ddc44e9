"""The report over all jobs: why they failed and what that cost, which nodes keep failing, what repairs came to. Pure.

It rests on the run store alone, so it covers the time that the store keeps.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from trainmedic_server.domain.alert import Identity
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
    alerts: set[Identity] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    touched: int = 0


@dataclass(slots=True)
class _Repairs:
    statuses: Counter[Status] = field(default_factory=Counter)
    lengths: list[float] = field(default_factory=list)
    """Seconds, of those that succeeded."""


class RunTally:
    """Counts runs as they are read, so that none of them is kept."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = defaultdict(_Node)
        self._repairs: dict[str, _Repairs] = defaultdict(_Repairs)

    def add(self, run: Run) -> None:
        target = run.target
        if target is not None and target.node is not None and target.kind in (TargetKind.NODE, TargetKind.GPU):
            self._nodes[target.node].alerts.add(run.alert)
            self._nodes[target.node].names.add(run.alert_name)
        for node in run.touched:
            self._nodes[node].touched += 1
        if run.status is Status.NOT_STARTED:
            return
        repairs = self._repairs[run.playbook]
        repairs.statuses[run.status] += 1
        if run.status is Status.SUCCEEDED and run.ended_at is not None:
            repairs.lengths.append((run.ended_at - run.created_at).total_seconds())

    def nodes(self, verdicts: Sequence[VerdictRecord]) -> list[NodeTotal]:
        """Those with two troubles or more, the worst first."""
        jobs: dict[str, list[str]] = defaultdict(list)
        for verdict in verdicts:
            if verdict.node is not None:
                jobs[verdict.node].append(verdict.job)
        totals = [
            _node_total(name, self._nodes.get(name, _Node()), jobs.get(name, []))
            for name in self._nodes.keys() | jobs.keys()
        ]
        troubled = [total for total in totals if total.alerts + total.verdicts >= 2]
        return sorted(troubled, key=lambda total: (-total.verdicts, -total.alerts, total.node))[:MOST_NODES]

    def repairs(self) -> list[RepairTotal]:
        return [_repair_total(name, repairs) for name, repairs in sorted(self._repairs.items())]


def _node_total(name: str, node: _Node, jobs: Sequence[str]) -> NodeTotal:
    names, of_jobs = tuple(sorted(node.names)), tuple(sorted(set(jobs)))
    return NodeTotal(name, len(node.alerts), names, len(jobs), of_jobs, node.touched)


def _repair_total(playbook: str, repairs: _Repairs) -> RepairTotal:
    statuses = repairs.statuses
    succeeded, observed = statuses[Status.SUCCEEDED], statuses[Status.OBSERVED]
    still_open = sum(count for status, count in statuses.items() if status.is_open)
    return RepairTotal(
        playbook=playbook,
        runs=statuses.total(),
        succeeded=succeeded,
        failed=statuses.total() - succeeded - observed - still_open,
        observed=observed,
        open=still_open,
        median_seconds=statistics.median(repairs.lengths) if repairs.lengths else None,
    )


def fleet_report(
    since: datetime,
    until: datetime,
    events: Sequence[Event],
    runs: RunTally,
    verdicts: Sequence[VerdictRecord],
    left_out: Mapping[str, str],
) -> FleetReport:
    """The report on all jobs from `since` to `until`. `left_out` says of which parts there was too much to be read."""
    failures = list(_all_failures(events, verdicts))
    unknown = dict(left_out)
    if failures and not verdicts:
        unknown["causes"] = "no failure was diagnosed in that time"
    return FleetReport(
        TimeRange(since, until),
        len(failures),
        tuple(_causes(failures)),
        tuple(runs.nodes(verdicts)),
        tuple(runs.repairs()),
        unknown,
    )


def _all_failures(
    events: Sequence[Event], verdicts: Sequence[VerdictRecord]
) -> Iterable[tuple[str, FailureRecord, int | None]]:
    """Each failure with its job, and how many ranks the job had."""
    by_job: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_job[str(event.data.get("job", ""))].append(event)
    for job in sorted(by_job.keys() | {verdict.job for verdict in verdicts}):
        of_job = by_job[job]
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
