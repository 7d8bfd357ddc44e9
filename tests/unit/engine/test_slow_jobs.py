"""Slow jobs: a verdict while an alert says so, by what each rank's steps went into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import count

import pytest
from msgspec.structs import replace

from tests.support.clocks import ManualClock
from tests.unit.diagnosis.test_job_diagnoses import World
from trainmedic_logs.domain.finding import CauseClass, Role
from trainmedic_logs.domain.known_verdict import KnownVerdict
from trainmedic_server.domain.alert import Alert, AlertRecord, AlertStatus
from trainmedic_server.domain.job_verdict import JobVerdict, VerdictsOnJob
from trainmedic_server.engine.job_verdicts import JobVerdicts
from trainmedic_server.engine.slow_jobs import SlowJobs
from trainmedic_server.errors import MetricsRefused, MetricsUnavailable
from trainmedic_server.ports.metric_history import MetricSeries
from trainmedic_server.reports.compiling import ReportCompiler
from trainmedic_server.telemetry import Metrics


class Prometheus:
    """What is measured of llm-1: seconds of a step by part, and of its slowest ranks."""

    def __init__(self, data: float, compute: float, wait: float, ranks: int = 8) -> None:
        self.values = {"data": data, "compute": compute, "wait": wait}
        self.ranks = ranks
        self.own: dict[int, float] = {}
        self.data: dict[int, float] = {}
        self.is_away = False
        self.asked = 0

    async def read(self, query: str, begin: datetime, end: datetime, every: timedelta) -> Sequence[MetricSeries]:
        self.asked += 1
        if self.is_away:
            raise MetricsUnavailable("away")
        assert 'job_name="llm-1"' in query
        at = end.timestamp()
        if "training_ranks{" in query:
            return [MetricSeries({}, [(at, float(self.ranks))])]
        for part, by_rank in (("own", self.own), ("data", self.data)):
            if f"training_rank_{part}_seconds" in query:
                labels = ({"rank": str(rank), "rank_node": f"node-{rank}"} for rank in by_rank)
                return [MetricSeries(of, [(at, seconds)]) for of, seconds in zip(labels, by_rank.values(), strict=True)]
        part = query.partition("training_")[2].partition("_seconds")[0]
        return [MetricSeries({}, [(at, self.values[part])])] if part in self.values else []


class Slow:
    """A job whose throughput drops, in a world that tells what verdicts raise."""

    def __init__(self, prometheus: Prometheus | None) -> None:
        self.world = World()
        self.clock: ManualClock = self.world.clock
        self.verdicts = JobVerdicts(self.clock)
        ids = count()
        self.watching = SlowJobs(
            self.world.store, prometheus, self.verdicts, self.clock, Metrics(), lambda: f"s{next(ids)}"
        )

    async def fire(self, name: str = "TrainingThroughputDrop", job: str = "llm-1") -> None:
        now = self.clock.now()
        alert = Alert(job, AlertStatus.FIRING, {"alertname": name, "job_name": job}, {}, now)
        await self.world.store.transact(lambda tx: tx.save_alerts([AlertRecord(alert, now, now)]))

    async def made(self) -> list[KnownVerdict]:
        await self.watching.look()
        return await self.world.store.verdicts_of("llm-1", 10)


async def test_one_slow_rank_is_named_told_and_known_to_playbooks() -> None:
    """Of the other ranks only the median is known. Its node is shown as evidence, and never named as at fault."""
    prometheus = Prometheus(0.02, 0.58, 0.4)
    prometheus.own = {5: 1.0, 3: 0.6}
    slow = Slow(prometheus)
    await slow.fire("TrainingStraggler")
    (verdict,) = await slow.made()
    assert (verdict.cause, verdict.plain["ranks"], verdict.node, verdict.attempt) == ("node", [5], None, None)
    assert verdict.plain["shares"] == {"data": 0.02, "compute": 0.58, "wait": 0.4}
    assert verdict.plain["evidence"][0]["node"] == "node-5"
    assert slow.verdicts.current() == {"llm-1": VerdictsOnJob(slowness=JobVerdict("node", "medium", "ask", None, (5,)))}
    await slow.world.look()
    (alert,) = slow.world.told
    assert (alert.name, alert.labels["severity"], alert.labels["cause"]) == ("TrainingSlow", "warning", "node")


@pytest.mark.parametrize(("own", "data", "cause"), [({5: 1.0}, {5: 0.4}, "data"), ({}, {}, "network")])
async def test_the_other_causes(own: dict[int, float], data: dict[int, float], cause: str) -> None:
    """One rank's loader; and where all wait alike, the wire."""
    prometheus = Prometheus(0.02, 0.58, 0.4)
    prometheus.own, prometheus.data = own, data
    slow = Slow(prometheus)
    await slow.fire()
    (verdict,) = await slow.made()
    assert verdict.cause == cause


async def test_where_no_single_cause_explains_it_the_shares_are_stored_and_nobody_is_told() -> None:
    """A third each."""
    slow = Slow(Prometheus(0.33, 0.34, 0.33))
    await slow.fire()
    (verdict,) = await slow.made()
    assert (verdict.cause, verdict.tell_at, verdict.labels) == ("unknown", None, None)
    assert verdict.plain["shares"]["wait"] == 0.33


async def test_nothing_is_made_of_what_is_not_measured_or_not_slow() -> None:
    """No alert, no parts, no Prometheus: no verdict, and the loop goes on."""
    prometheus = Prometheus(0.5, 0.4, 0.1)
    slow = Slow(prometheus)
    assert await slow.made() == []
    assert prometheus.asked == 0
    await slow.fire("TrainingStraggler")
    del prometheus.values["wait"]
    assert await slow.made() == []
    prometheus.is_away = True
    with pytest.raises(MetricsUnavailable):
        await slow.made()


async def test_each_of_many_slow_jobs_has_its_turn() -> None:
    """Twenty are looked at together, and the others next."""
    slow = Slow(None)
    for number in range(25):
        await slow.fire(job=f"job-{number:02}")
    for _ in range(2):
        await slow.watching.look()
    assert len(await slow.world.store.verdicts_of("job-24", 10)) == 1


async def test_a_job_whose_query_is_refused_keeps_no_other_waiting() -> None:
    """The look ends with the error, and the next one goes on behind that job."""

    class Choosy(Prometheus):
        async def read(self, query: str, begin: datetime, end: datetime, every: timedelta) -> Sequence[MetricSeries]:
            if 'job_name="a"' in query:
                raise MetricsRefused("too many samples")
            return await super().read(query, begin, end, every)

    slow = Slow(Choosy(0.5, 0.45, 0.05))
    await slow.fire(job="a")
    await slow.fire()
    with pytest.raises(MetricsRefused):
        await slow.watching.look()
    with pytest.raises(MetricsRefused):
        await slow.watching.look()
    assert len(await slow.world.store.verdicts_of("llm-1", 10)) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
async def test_a_value_that_is_no_number_is_not_measured(value: float) -> None:
    """A job can report any; it stops no other job's verdict."""
    prometheus = Prometheus(0.02, 0.58, 0.4)
    prometheus.ranks = value  # type: ignore[assignment]
    prometheus.own = {5: 1.0, 3: value}
    slow = Slow(prometheus)
    await slow.fire("TrainingStraggler")
    (verdict,) = await slow.made()
    assert verdict.plain["ranks"] == [5]


@pytest.mark.parametrize(("has_timeouts", "cause"), [(True, "network"), (False, "data")])
async def test_without_parts_of_the_steps_timeouts_decide_and_it_stays_a_hint(
    *, has_timeouts: bool, cause: str
) -> None:
    """A server without a Prometheus says it too. Nobody is told, and no playbook sees it."""
    slow = Slow(None)
    if has_timeouts:
        await slow.world.time_out("f1", frozenset({3}))
    await slow.fire()
    (verdict,) = await slow.made()
    assert (verdict.cause, verdict.confidence, verdict.node) == (cause, "low", None)
    assert "a hint" in verdict.plain["summary"]
    assert verdict.plain["missing"] == ["parts of the steps"]
    assert len(verdict.plain["evidence"]) == 1 + has_timeouts
    assert (verdict.labels, verdict.tell_at, slow.verdicts.current()) == (None, None, {})


async def test_parts_of_the_steps_win_over_timeouts() -> None:
    """What was measured says more."""
    slow = Slow(Prometheus(0.5, 0.45, 0.05))
    await slow.world.time_out("f1", frozenset({3}))
    await slow.fire()
    (verdict,) = await slow.made()
    assert (verdict.cause, verdict.confidence) == ("data", "medium")


async def test_the_trainers_own_figures_are_evidence() -> None:
    """Its log states how long it waits for data, so a timeout next to it is beside the matter."""
    slow = Slow(None)
    await slow.world.time_out("f1", frozenset({3}))
    line = "time: 8.7000 data: 8.6000"
    await slow.world.find("f2", rule="waits-for-data", role=Role.CONFIRMATION, cause=CauseClass.DATA, line=line)
    await slow.fire()
    (verdict,) = await slow.made()
    assert (verdict.cause, verdict.confidence) == ("data", "medium")
    assert verdict.plain["evidence"][0]["line"] == line
    assert verdict.labels is not None
    assert verdict.labels["alertname"] == "TrainingSlow"


async def test_a_verdict_is_made_anew_each_quarter_of_an_hour_and_hides_no_failure() -> None:
    """A failure that comes while the job is slow has its own verdict, and counts no slow one as an earlier failure."""
    slow = Slow(Prometheus(0.5, 0.45, 0.05))
    await slow.fire()
    assert len(await slow.made()) == 1
    slow.clock.sleep(60)
    assert len(await slow.made()) == 1
    await slow.world.find("f1")
    await slow.world.look(11)
    failure, slow_one = await slow.made()
    assert (failure.is_slow, slow_one.is_slow) == (False, True)
    assert failure.plain["same_before"] == 0
    assert failure.labels is not None
    assert failure.labels["alertname"] == "TrainingFailed"
    slow.clock.sleep(15 * 60)
    assert len([verdict for verdict in await slow.made() if verdict.is_slow]) == 2
    records = await slow.world.store.verdicts(slow_one.began_at, slow.clock.now())
    assert [record.is_slow for record in records] == [True, False]


async def test_many_failures_hide_no_slow_verdict() -> None:
    """However often the job fails within the quarter of an hour."""
    slow = Slow(Prometheus(0.5, 0.45, 0.05))
    await slow.fire()
    (verdict,) = await slow.made()
    failures = [
        replace(verdict, id=f"f{number}", began_at=verdict.began_at + timedelta(seconds=number), fingerprint="gpu:xid")
        for number in range(1, 12)
    ]
    await slow.world.store.transact(lambda tx: tx.verdicts.save(failures))
    slow.clock.sleep(60)
    await slow.watching.look()
    assert [each.is_slow for each in await slow.world.store.verdicts_of("llm-1", 20)].count(True) == 1


async def test_a_report_shows_slow_times_beside_failures_and_counts_them_for_none() -> None:
    """Nor does that over all jobs."""
    slow = Slow(Prometheus(0.5, 0.45, 0.05))
    await slow.fire()
    (verdict,) = await slow.made()
    compiler = ReportCompiler(slow.world.store, None, slow.world.store, slow.clock)
    begin, end = verdict.began_at - timedelta(minutes=1), slow.clock.now() + timedelta(minutes=1)
    report = await compiler.job("llm-1", begin, end)
    assert ([each.cause for each in report.slow], report.failure_count) == (["data"], 0)
    assert (await compiler.fleet(begin, end)).causes == ()
