"""What is gathered for a report, and how much of it at most."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Collection
from datetime import datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.clocks import START
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain.alert import Identity
from trainmedic_server.domain.effect import EffectVerdict
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.run import Decision, Event, Run, Status, StepState, StepStatus
from trainmedic_server.ports.store import HistoryFilter
from trainmedic_server.ports.tallies import PlaybookTally
from trainmedic_server.ports.verdicts import VerdictRecord
from trainmedic_server.reports import compiling
from trainmedic_server.reports.compiling import ReportCompiler
from trainmedic_server.reports.failures import failures_of, moments
from trainmedic_server.reports.job_report import MOST_LISTED

SINCE = START - timedelta(days=1)


def run(number: int, status: Status = Status.SUCCEEDED, node: str = "node-1") -> Run:
    began = START - timedelta(seconds=number)
    return Run(
        id=f"run-{number}",
        playbook="cool",
        version="v1",
        target=Target(TargetKind.NODE, node=node),
        mode=Mode.ENFORCE,
        status=status,
        decision=Decision.STARTED,
        alert=Identity(f"{number:016x}", began),
        alert_name="GPUHot",
        alert_labels={},
        created_at=began,
        ended_at=began + timedelta(seconds=number),
    )


class Kept:
    """A history of these runs, newest first, and events."""

    def __init__(self, runs: list[Run], events: list[Event] | None = None) -> None:
        self.runs = runs
        self.events = events or []
        self.effects: dict[str, EffectVerdict] = {}

    async def stream(self, matching: HistoryFilter) -> AsyncIterator[Run]:
        for each in self.runs:
            yield each

    async def events_of_jobs(
        self, kinds: Collection[str], since: datetime, until: datetime, limit: int, job: str | None = None
    ) -> list[Event]:
        return self.events[-limit:]

    async def tally(self, since: datetime, until: datetime) -> dict[str, PlaybookTally]:
        tallies: dict[str, PlaybookTally] = {}
        for each in self.runs:
            if since <= each.created_at < until:
                tally = tallies.setdefault(each.playbook, PlaybookTally())
                tally.statuses[each.status] += 1
                if each.status is Status.SUCCEEDED and each.ended_at is not None:
                    tally.repair_seconds[(each.ended_at - each.created_at).total_seconds()] += 1
        return tallies

    async def effects_between(self, since: datetime, until: datetime, limit: int) -> dict[str, EffectVerdict]:
        return self.effects


class Judged:
    """Verdicts on failures of two jobs, each of which names a node."""

    async def verdicts(self, since: datetime, until: datetime, job: str | None = None) -> list[VerdictRecord]:
        return [
            VerdictRecord("llm-1", START - timedelta(hours=2), "gpu", "high", "node-9", summary="XID 79"),
            VerdictRecord("llm-2", START - timedelta(hours=1), "gpu", "high", "node-9"),
        ]


def failed(job: str, hours: float, **data: object) -> list[Event]:
    """A failure, and half an hour later the next attempt."""
    at = START - timedelta(hours=hours)
    return [
        Event("job_failed", at, data={"job": job, **data}),
        Event("job_restarted", at + timedelta(minutes=30), data={"job": job}),
    ]


async def test_repairs_that_did_not_start_are_none_and_the_newest_are_listed() -> None:
    """All are counted, oldest of the listed first."""
    runs = [run(0, Status.NOT_STARTED), *(run(number) for number in range(1, MOST_LISTED + 50))]
    report = await ReportCompiler(Kept(runs)).job("llm-1", SINCE, START)  # type: ignore[arg-type]
    assert report.repair_count == MOST_LISTED + 49
    assert [report.repairs[0].run_id, report.repairs[-1].run_id] == [f"run-{MOST_LISTED}", "run-1"]
    assert "repairs" not in report.unknown


async def test_more_than_can_be_read_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of runs as of events, in both reports."""
    monkeypatch.setattr(compiling, "MOST_RUNS", 5)
    monkeypatch.setattr(compiling, "MOST_EVENTS", 2)
    history = Kept([run(number) for number in range(6)], failed("llm-1", 2))
    for report, part in (
        (await ReportCompiler(history).job("llm-1", SINCE, START), "repairs"),  # type: ignore[arg-type]
        (await ReportCompiler(history).fleet(SINCE, START), "repaired"),  # type: ignore[arg-type]
    ):
        assert report.unknown[part] == "only the newest 5 runs were read"
        assert report.unknown["failures"] == "only the newest 2 events of jobs were read"


async def test_failures_are_counted_by_the_cause_of_their_verdict() -> None:
    """With the GPU-hours that they cost; the node that both name is one that keeps failing."""
    events = sorted(
        [*failed("llm-1", 2, ranks=16), *failed("llm-2", 1, ranks=8), *failed("llm-3", 3, ranks=4)],
        key=lambda event: event.at,
    )
    report = await ReportCompiler(Kept([run(1)], events), verdicts=Judged()).fleet(SINCE, START)  # type: ignore[arg-type]
    assert [(cause.cause, cause.failures, cause.jobs, cause.lost_gpu_hours) for cause in report.causes] == [
        ("gpu", 2, 2, 12.0),
        ("unknown", 1, 1, 2.0),
    ]
    assert [(node.node, node.verdicts, node.jobs) for node in report.nodes] == [("node-9", 2, ("llm-1", "llm-2"))]
    assert report.unknown == {}


async def test_jobs_of_which_only_verdicts_tell_are_counted_as_well() -> None:
    """Without hours, since nobody has told how long they were down."""
    report = await ReportCompiler(Kept([]), verdicts=Judged()).fleet(SINCE, START)  # type: ignore[arg-type]
    (cause,) = report.causes
    assert (report.failures, cause.cause, cause.failures, cause.lost_gpu_hours, cause.uncounted) == (
        2,
        "gpu",
        2,
        None,
        2,
    )
    assert (cause.down_seconds, cause.not_back) == (None, 2)


async def test_a_repair_that_is_open_or_only_observed_has_neither_succeeded_nor_failed() -> None:
    """The median time is that of those that succeeded."""
    statuses = (Status.SUCCEEDED, Status.SUCCEEDED, Status.FAILED, Status.CANCELLED, Status.OBSERVED, Status.WAITING)
    runs = [run(number, status) for number, status in enumerate(statuses, 1)]
    report = await ReportCompiler(Kept(runs)).fleet(SINCE, START)  # type: ignore[arg-type]
    (total,) = report.repairs
    assert (total.runs, total.succeeded, total.failed, total.observed, total.open) == (6, 2, 2, 1, 1)
    assert total.median_seconds == 1.5


def on_job(number: int, ranks: int | None, minutes: float, **changes: Any) -> Run:
    """A run on a job that answered with so many ranks and took so long."""
    output = {} if ranks is None else {"ranks": ranks}
    step = StepState("steps", 0, "act", "action", "job.scale_lr", StepStatus.SUCCEEDED, output=output)
    made = replace(run(number), target=Target(TargetKind.JOB, job="llm-1"), steps=(step,), **changes)
    return replace(made, ended_at=made.created_at + timedelta(minutes=minutes))


async def test_gpu_hours_are_kept_by_runs_that_were_measured_to_help() -> None:
    """GPUs by the time that a person would have taken longer; what is not known is not counted, and said."""
    kept = Kept([on_job(1, 16, 6), on_job(2, 16, 45), on_job(3, 8, 1), on_job(4, None, 1), on_job(5, 64, 1)])
    kept.effects = {f"run-{number}": EffectVerdict.HELPED for number in (1, 2, 4)}
    kept.effects["run-5"] = EffectVerdict.NO_CHANGE
    report = await ReportCompiler(kept).fleet(SINCE, START, timedelta(minutes=36))  # type: ignore[arg-type]
    hours = report.gpu_hours_kept
    assert (hours.gpu_hours, hours.runs, hours.uncounted) == (8.0, 2, 3)
    assert hours.person_after_seconds == 36 * 60
    assert hours.assumptions[0] == "a person would have repaired it 36 min after the alert (person_after)"
    assert "GPUs ×" in hours.formula


async def test_repairs_are_counted_by_cause_and_observed_ones_are_none() -> None:
    """The cause is what the alert says of it, else its name."""
    observed = on_job(3, 8, 1, status=Status.OBSERVED)
    failed_one = on_job(2, 8, 1, status=Status.FAILED, alert_labels={"cause": "gpu"})
    kept = Kept([on_job(1, 8, 1, alert_labels={"cause": "gpu"}), failed_one, observed, on_job(4, 8, 1)])
    kept.effects = {"run-1": EffectVerdict.HELPED}
    report = await ReportCompiler(kept).fleet(SINCE, START)  # type: ignore[arg-type]
    assert [
        (each.cause, each.runs, each.succeeded, each.failed, each.helped, each.measured) for each in report.repaired
    ] == [
        ("gpu", 2, 1, 1, 1, 1),
        ("GPUHot", 1, 1, 0, 0, 0),
    ]


async def test_a_node_that_needs_help_again_within_a_day_came_back() -> None:
    """Its mean time between interruptions is the time of the report by its alerts."""
    hours = (1, 3, 30, 80)
    began = [START - timedelta(hours=hour) for hour in hours]
    runs = [replace(run(number), created_at=at, ended_at=at + timedelta(minutes=5)) for number, at in enumerate(began)]
    report = await ReportCompiler(Kept(runs)).fleet(START - timedelta(hours=100), START)  # type: ignore[arg-type]
    (node,) = report.nodes
    assert (node.alerts, node.came_back, node.mtbi_seconds) == (4, 1, 25 * 3600)


@pytest.mark.parametrize("second", [Status.SUCCEEDED, Status.FAILED])
@pytest.mark.parametrize(("third", "came_back"), [(4, 0), (30, 1)])
async def test_a_run_beside_another_on_the_node_is_no_return(third: int, came_back: int, second: Status) -> None:
    """Two of its GPUs were hot at once, and each had its run."""
    began = [START + timedelta(minutes=minutes) for minutes in (third, 1, 0)]
    statuses = (Status.SUCCEEDED, second, Status.SUCCEEDED)
    runs = [
        replace(run(number, status), created_at=at, ended_at=at + timedelta(minutes=5))
        for number, (status, at) in enumerate(zip(statuses, began, strict=True))
    ]
    report = await ReportCompiler(Kept(runs)).fleet(START, START + timedelta(hours=1))  # type: ignore[arg-type]
    assert [(node.alerts, node.came_back) for node in report.nodes] == [(3, came_back)]


def event(kind: str, minutes: float, reason: str = "") -> Event:
    return Event(kind, START + timedelta(minutes=minutes), data={"job": "llm-1", "reason": reason})


def verdict(minutes: float, cause: str) -> VerdictRecord:
    return VerdictRecord("llm-1", START + timedelta(minutes=minutes), cause, "medium", summary=f"it was {cause}")


def test_a_verdict_goes_with_the_failure_that_it_is_on() -> None:
    """Also where the first sign came ten minutes before the job died, as with a hang."""
    events = [event("job_failed", 0), event("job_restarted", 1), event("job_failed", 60), event("job_restarted", 61)]
    failures = failures_of(events, [verdict(0.1, "code"), verdict(50, "hang")])
    assert [(failure.verdict and failure.verdict.cause, failure.down_seconds) for failure in failures] == [
        ("code", 60.0),
        ("hang", 60.0),
    ]


def test_a_verdict_on_what_nobody_has_told_of_is_a_failure_as_well() -> None:
    """Of a job whose SDK does not say how it ends, or that only hung. One that was made anew is the newer one's."""
    failures = failures_of(
        [event("job_failed", 0)], [verdict(-1, "network"), verdict(0.5, "gpu"), verdict(300, "hang")]
    )
    assert [(failure.kind, failure.verdict and failure.verdict.cause) for failure in failures] == [
        ("job_failed", "gpu"),
        ("diagnosed", "hang"),
    ]
    assert failures[1].reason == "it was hang"


def test_how_long_a_restart_took_is_known_of_failures_that_were_told() -> None:
    """Once where two tell of the same; not where the job was only not heard of, nor where it is still down."""
    kinds = ["job_failed", "job_failed", "job_restarted", "job_gone", "job_returned", "job_failed"]
    known = moments([event(kind, number) for number, kind in enumerate(kinds)])
    assert [(told.begin, told.end) for told in known.restarted] == [
        (event("job_failed", 0).at.timestamp(), event("job_restarted", 2).at.timestamp())
    ]


@pytest.mark.parametrize(
    ("kinds", "failures"),
    [
        (["job_failed", "job_gone"], 1),
        (["job_failed", "job_restarted", "job_gone"], 2),
        (["job_failed", "job_failed"], 2),
        (["job_gone", "job_returned", "job_failed", "job_gone", "job_returned"], 2),
        (["job_ended"], 0),
    ],
)
def test_that_a_job_is_gone_follows_from_its_failure(kinds: list[str], failures: int) -> None:
    """Unless it was heard of in between."""
    assert len(failures_of([event(kind, number) for number, kind in enumerate(kinds)], ())) == failures


def test_a_job_that_comes_and_goes_for_months_is_counted_at_once() -> None:
    """The server answers nobody else in this time."""
    events = [event(("job_gone", "job_returned")[number % 2], number) for number in range(20_000)]
    verdicts = [verdict(4 * number, "gpu") for number in range(4000)]
    began = time.perf_counter()
    assert len(failures_of(events, verdicts)) == 10_000
    assert time.perf_counter() - began < 4
