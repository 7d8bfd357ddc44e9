"""Report on all jobs: failures by cause with their cost, failing nodes and repair outcomes."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta

from trainmedic_server.domain import places
from trainmedic_server.domain.alert import Identity
from trainmedic_server.domain.event_codec import content_of
from trainmedic_server.domain.event_kinds import JobFailed, JobGone, LifeEvent
from trainmedic_server.domain.run import Event, Run, Status
from trainmedic_server.ports.tallies import PlaybookTally
from trainmedic_server.ports.verdicts import VerdictRecord
from trainmedic_server.reports.failures import FailureRecord, failures_of
from trainmedic_server.reports.job_report import TimeRange
from trainmedic_server.reports.repair_outcomes import CauseRepairs, GpuHoursKept, RepairTally, RepairTotal, repair_total

MOST_NODES = 50
CAME_BACK_WITHIN = timedelta(days=1)
SAME_INTERRUPTION = timedelta(minutes=10)
"""Most time between two successive faults of one interruption."""
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CauseTotal:
    cause: str
    failures: int
    jobs: int
    down_seconds: float | None  # Sum for restarted jobs; None if none was.
    not_back: int  # No restart was reported: the job may still be down.
    lost_gpu_hours: float | None
    """Downtime times ranks, one GPU for each rank. None if unknown for all failures."""
    uncounted: int  # Failures missing from the hours: unknown ranks, or no restart.


@dataclass(frozen=True, slots=True)
class NodeTotal:
    node: str
    alerts: int  # With a reacting playbook.
    alert_names: tuple[str, ...]
    verdicts: int  # With high confidence.
    jobs: tuple[str, ...]
    touched: int  # Runs that changed the node.
    mtbi_seconds: float | None
    """Mean time between interruptions: the report's period divided by their number. Runs and verdicts within
    `SAME_INTERRUPTION` of each other are one. None for a single one.
    """
    came_back: int  # Runs that followed a successful one, at the latest a day after its end.


@dataclass(frozen=True, slots=True)
class DayTotal:
    """Failures and repairs that started on one day (UTC)."""

    day: date
    failures: int
    succeeded: int
    failed: int  # Includes cancelled and rejected repairs.


@dataclass(frozen=True, slots=True)
class FleetReport:
    time_range: TimeRange
    failures: int
    causes: tuple[CauseTotal, ...]
    nodes: tuple[NodeTotal, ...]
    repairs: tuple[RepairTotal, ...]
    repaired: tuple[CauseRepairs, ...]
    gpu_hours_kept: GpuHoursKept
    unknown: Mapping[str, str]
    days: tuple[DayTotal, ...] = ()


@dataclass(frozen=True, slots=True)
class _JobFailure:
    job: str
    failure: FailureRecord
    ranks: int | None


@dataclass(slots=True)
class _Node:
    alerts: set[Identity] = field(default_factory=set)
    alert_times: list[datetime] = field(default_factory=list)
    alert_names: set[str] = field(default_factory=set)
    touched: int = 0
    # Starts of the 50 runs added last, newest first. The first one after the run to add is sought among them.
    run_times: deque[datetime] = field(default_factory=lambda: deque(maxlen=50))
    returned_at: set[datetime] = field(default_factory=set)  # Starts of runs within a day after a success.


class RunTally:
    """Counts of runs, which are added newest first."""

    def __init__(self, repairs: RepairTally) -> None:
        self._nodes: dict[str, _Node] = defaultdict(_Node)
        self.repairs = repairs
        self.by_day: Counter[tuple[date, bool]] = Counter()  # Closed runs by day and success.

    def add(self, run: Run) -> None:
        of_target = places.counted_nodes(run.target) if run.target is not None else frozenset[str]()
        for node in of_target:
            self._nodes[node].alerts.add(run.alert)
            self._nodes[node].alert_times.append(run.created_at)
            self._nodes[node].alert_names.add(run.alert_name)
        for node in run.touched:
            self._nodes[node].touched += 1
        self.repairs.add(run)
        if run.status in (Status.NOT_STARTED, Status.OBSERVED):
            return
        if not run.is_open:
            self.by_day[run.created_at.astimezone(UTC).date(), run.status is Status.SUCCEEDED] += 1
        repaired_at = run.ended_at if run.status is Status.SUCCEEDED else None
        for name in of_target.union(run.touched):
            of_node = self._nodes[name]
            if repaired_at is not None:
                # Runs that began before this one's end, as on another GPU of the node, did not follow it.
                following = next((at for at in reversed(of_node.run_times) if at >= repaired_at), None)
                if following is not None and following - repaired_at < CAME_BACK_WITHIN:
                    of_node.returned_at.add(following)
            of_node.run_times.append(run.created_at)

    def nodes(self, verdicts: Sequence[VerdictRecord], time: timedelta) -> list[NodeTotal]:
        """Return at most `MOST_NODES` with two or more alerts and verdicts together, most verdicts first."""
        of_node: dict[str, list[VerdictRecord]] = defaultdict(list)
        for verdict in verdicts:
            if verdict.node is not None:
                of_node[verdict.node].append(verdict)
        totals = [
            _node_total(name, self._nodes.get(name, _Node()), of_node.get(name, []), time)
            for name in self._nodes.keys() | of_node.keys()
        ]
        faulty = [total for total in totals if total.alerts + total.verdicts >= 2]
        return sorted(faulty, key=lambda total: (-total.verdicts, -total.alerts, total.node))[:MOST_NODES]


def _node_total(name: str, node: _Node, verdicts: Sequence[VerdictRecord], time: timedelta) -> NodeTotal:
    jobs = [verdict.job for verdict in verdicts]
    interruptions = _interruptions([*node.alert_times, *(verdict.at for verdict in verdicts)])
    return NodeTotal(
        node=name,
        alerts=len(node.alerts),
        alert_names=tuple(sorted(node.alert_names)),
        verdicts=len(jobs),
        jobs=tuple(sorted(set(jobs))),
        touched=node.touched,
        mtbi_seconds=time.total_seconds() / interruptions if interruptions > 1 else None,
        came_back=len(node.returned_at),
    )


def _interruptions(fault_times: Iterable[datetime]) -> int:
    number, latest = 0, None
    for at in sorted(fault_times):
        if latest is None or at - latest > SAME_INTERRUPTION:
            number += 1
        latest = at
    return number


def fleet_report(
    since: datetime,
    until: datetime,
    events: Sequence[Event],
    runs: RunTally,
    tallies: Mapping[str, PlaybookTally],
    verdicts: Sequence[VerdictRecord],
    left_out: Mapping[str, str],
) -> FleetReport:
    failures = list(_all_failures(events, verdicts))
    unknown = dict(left_out)
    if failures and not verdicts:
        unknown["causes"] = "no failure was diagnosed in that time"
    return FleetReport(
        TimeRange(since, until),
        len(failures),
        tuple(_causes(failures)),
        tuple(runs.nodes(verdicts, until - since)),
        tuple(repair_total(playbook, tally) for playbook, tally in sorted(tallies.items())),
        tuple(runs.repairs.causes()),
        runs.repairs.gpu_hours(sum((tally.person_seconds for tally in tallies.values()), Counter())),
        unknown,
        tuple(_days(since, until, failures, runs.by_day)),
    )


def _days(
    since: datetime,
    until: datetime,
    failures: Sequence[_JobFailure],
    repairs: Mapping[tuple[date, bool], int],
) -> Iterator[DayTotal]:
    failed = Counter(each.failure.at.astimezone(UTC).date() for each in failures)
    day, last = since.astimezone(UTC).date(), until.astimezone(UTC).date()
    while day <= last:
        yield DayTotal(day, failed[day], repairs.get((day, True), 0), repairs.get((day, False), 0))
        day += timedelta(days=1)


def _all_failures(events: Sequence[Event], verdicts: Sequence[VerdictRecord]) -> Iterator[_JobFailure]:
    by_job: dict[str, list[Event]] = defaultdict(list)
    ranks: dict[tuple[str, datetime], int | None] = {}
    for event in events:
        content = content_of(event)
        if isinstance(content, LifeEvent):
            by_job[content.job].append(event)
        if isinstance(content, (JobFailed, JobGone)):
            ranks[content.job, event.at] = content.ranks
    for job in sorted(by_job.keys() | {verdict.job for verdict in verdicts}):
        of_job = by_job[job]
        on_job = [verdict for verdict in verdicts if verdict.job == job]
        for failure in failures_of(of_job, on_job):
            yield _JobFailure(job, failure, ranks.get((job, failure.at)))


def _causes(failures: Sequence[_JobFailure]) -> list[CauseTotal]:
    by_cause: dict[str, list[_JobFailure]] = defaultdict(list)
    for each in failures:
        verdict = each.failure.verdict
        by_cause[verdict.cause if verdict else UNKNOWN].append(each)
    totals = [_cause(cause, of_cause) for cause, of_cause in by_cause.items()]
    return sorted(totals, key=lambda total: (-(total.lost_gpu_hours or 0.0), -total.failures, total.cause))


def _cause(cause: str, failures: Sequence[_JobFailure]) -> CauseTotal:
    downtimes = [(seconds, each.ranks) for each in failures if (seconds := each.failure.down_seconds) is not None]
    costs = [seconds * ranks / 3600 for seconds, ranks in downtimes if ranks is not None]
    return CauseTotal(
        cause=cause,
        failures=len(failures),
        jobs=len({each.job for each in failures}),
        down_seconds=sum(seconds for seconds, _ in downtimes) if downtimes else None,
        not_back=len(failures) - len(downtimes),
        lost_gpu_hours=round(sum(costs), 3) if costs else None,
        uncounted=len(failures) - len(costs),
    )
