"""Each failure that a launcher reports has its verdict, and what it reports as ended well has none."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.diagnosis.test_job_diagnoses import World, stepping
from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.diagnosis import reported_end
from trainmedic_logs.domain.finding import CLAIMED_JOB, CauseClass, Origin, Role
from trainmedic_logs.domain.known_verdict import KnownVerdict
from trainmedic_server.domain.alert import AlertStatus
from trainmedic_server.domain.job_life import JobLife, LifeState
from trainmedic_server.domain.run import Event
from trainmedic_server.engine.job_diagnoses import JobDiagnoses
from trainmedic_server.ports.outside import Presence
from trainmedic_server.telemetry import Metrics

RAISED: dict[str, Any] = {"rule": "python-exception", "role": Role.ROOT, "cause": CauseClass.CODE}
KILLED: dict[str, Any] = {"status": -9, "reason": "the job was ended by SIGKILL", "pid": 812}


class Reports:
    """What launchers of job ``mt-5`` report to a world."""

    def __init__(self) -> None:
        self.world = World()
        self._failures = 0

    async def say(self, kind: str, attempt: int | None, job: str = "mt-5", **data: Any) -> None:
        """A notice was taken into the history."""
        now = self.world.clock.now()
        self._failures += kind == "job_failed"
        state = LifeState.ENDED if kind == "job_ended" else LifeState.PRESENT
        life = JobLife(job, state, now, failures=self._failures)
        said = {"job": job, **({"attempt": attempt, "node": "node-1"} if attempt else {}), **data}
        event = Event(kind, now, data=said)

        def work(tx: Any) -> None:
            tx.save_job_lives([life])
            tx.append([event])

        await self.world.store.transact(work)

    async def verdicts(self) -> list[tuple[int | None, str, str]]:
        """Attempt, cause and confidence, the oldest first."""
        known = await self.world.store.verdicts_of("mt-5", 20)
        return [(each.attempt, each.cause, each.confidence) for each in reversed(known)]

    async def raise_(self, attempt: int, line: str = "KeyError: 'mask'", **members: Any) -> None:
        """An exception of the attempt was read; what an earlier one showed is over then."""
        now = self.world.clock.now()

        def end_earlier(tx: Any) -> None:
            known = tx.findings.with_ids([f"raised-{number}" for number in range(attempt)]).values()
            tx.findings.save([replace(each, ended_at=now) for each in known])

        await self.world.store.transact(end_earlier)
        origin = Origin("launcher", "node-1", job="mt-5", attempt=attempt)
        members = {**RAISED, "fields": {"proof": "program"}, "origin": origin, **members}
        await self.world.find(f"raised-{attempt}", job="mt-5", line=line, **members)

    def launcher(self, state: str = "running") -> None:
        """The launcher is there."""
        details = {"node": "node-1", "state": state, "instance": "l", "reports_ends": True}
        self.world.present_launchers = [Presence("mt-5", self.world.clock.now(), details)]


async def test_a_failure_without_any_read_lines_has_a_verdict() -> None:
    """It comes five seconds after the report, and states only what ended the process."""
    reports = Reports()
    await reports.say("job_failed", 1, **KILLED)
    await reports.world.look(4)
    assert await reports.verdicts() == []
    await reports.world.look(2)
    assert await reports.verdicts() == [(1, "unknown", "low")]
    (alert,) = reports.world.told
    assert "SIGKILL" in alert.annotations["summary"]
    assert "node-1" in alert.annotations["summary"]


async def test_the_lines_of_a_reported_error_are_waited_for() -> None:
    """The alert keeps the cause that it begins with, and an agent on a busy node reads late."""
    reports = Reports()
    await reports.say("job_failed", 1, status=1, error="KeyError", reason="the job ended with exit code 1 (KeyError)")
    await reports.world.look(8)
    assert await reports.verdicts() == []
    await reports.raise_(1)
    await reports.world.look(6)
    (alert,) = reports.world.told
    assert alert.labels["cause"] == "code"
    await reports.say("job_failed", 2, status=1, error="KeyError", reason="the job ended with exit code 1 (KeyError)")
    await reports.world.look(16)
    assert [cause for _, cause, _ in await reports.verdicts()] == ["code", "unknown"]


async def test_each_attempt_has_its_own_verdict_from_its_own_lines() -> None:
    """There are three within seconds, one without output; a server that restarts makes no verdict twice."""
    reports = Reports()
    for attempt in (1, 2, 3):
        if attempt != 2:
            await reports.raise_(attempt, "KeyError: 'mask'" if attempt == 1 else "ValueError: no such axis")
        await reports.say("job_failed", attempt, status=1 if attempt != 2 else 9, reason="the job ended")
        await reports.world.look(1)
    await reports.world.look(10)
    assert await reports.verdicts() == [(1, "code", "high"), (2, "unknown", "low"), (3, "code", "high")]
    lines = [each.plain["evidence"][0]["line"] for each in await reports.world.store.verdicts_of("mt-5", 5)]
    assert lines == ["ValueError: no such axis", "the job ended", "KeyError: 'mask'"]
    world = reports.world
    again = JobDiagnoses(world.store, world, world, world.clock, Metrics(), timedelta(minutes=1))  # type: ignore[arg-type]
    await again.look()
    assert len(await reports.verdicts()) == 3


async def test_reports_that_were_read_at_once_are_distinguished() -> None:
    """The server was unavailable for as long as three attempts took."""
    reports = Reports()
    for attempt in (1, 2, 3):
        await reports.say("job_failed", attempt, **KILLED)
    await reports.world.look(6)
    await reports.world.look(6)
    assert [attempt for attempt, _, _ in await reports.verdicts()] == [1, 2, 3]
    newest, *_ = await reports.world.store.verdicts_of("mt-5", 5)
    assert newest.plain["same_before"] == 2


async def test_a_finding_of_a_numbered_attempt_joins_no_unnumbered_failures() -> None:
    reports = Reports()
    await reports.raise_(1)
    await reports.say("job_failed", None, reason="its process ended by OSError")
    await reports.world.look(6)
    await reports.world.look(60)
    await reports.say("job_failed", None, reason="its process ended by KeyError")
    for _ in range(3):
        await reports.world.look(6)
    assert len(await reports.verdicts()) == 2


async def test_two_failures_of_a_job_without_numbered_attempts_have_a_verdict_each() -> None:
    """The job was started again, and failed within the time of the first verdict's updates."""
    reports = Reports()
    await reports.say("job_failed", None, reason="its process ended by OSError")
    await reports.world.look(6)
    await reports.world.look(60)
    await reports.say("job_failed", None, reason="its process ended by KeyError")
    for _ in range(3):
        await reports.world.look(6)
    lines = [each.plain["evidence"][0]["line"] for each in await reports.world.store.verdicts_of("mt-5", 5)]
    assert lines == ["its process ended by KeyError", "its process ended by OSError"]


async def test_the_kernel_states_why_a_plain_program_was_killed() -> None:
    """Only the launcher's report identifies its process: no SDK was loaded, and no table was printed."""
    reports = Reports()
    members: dict[str, Any] = {"rule": "host-oom", "role": Role.ROOT, "cause": CauseClass.HOST_MEMORY}
    for finding_id, pid in (("neighbour", "77"), ("own", "812")):
        await reports.world.find(
            finding_id,
            **members,
            target=Target(TargetKind.NODE, node="node-1"),
            origin=Origin("kernel", "node-1"),
            fields={"pid": pid},
            labels={"pid": pid},
            is_printed=False,
            line=f"Memory cgroup out of memory: Killed process {pid} (python)",
        )
    await reports.say("job_failed", 1, **KILLED)
    await reports.world.look(6)
    assert await reports.verdicts() == [(1, "host_memory", "high")]
    (verdict,) = await reports.world.store.verdicts_of("mt-5", 5)
    assert "process 812" in verdict.plain["summary"]


async def test_a_file_that_names_the_job_counts_on_the_node_of_its_launcher() -> None:
    """A job of two seconds ends before the server knows it. Another node's file proves nothing."""
    for node, cause in (("node-1", "code"), ("node-2", "unknown")):
        reports = Reports()
        await reports.raise_(
            1,
            origin=Origin("launcher", node, attempt=1),
            target=Target(TargetKind.NODE, node=node),
            labels={CLAIMED_JOB: "mt-5"},
        )
        await reports.say("job_failed", 1, status=1, reason="the job ended with exit code 1 (KeyError)")
        await reports.world.look(6)
        assert [each[1] for each in await reports.verdicts()] == [cause]


async def test_output_of_a_job_that_ended_successfully_is_no_failure() -> None:
    """Its last lines are read after its launcher has reported the end."""
    reports = Reports()
    reports.launcher()
    await reports.world.look(5)
    await reports.world.time_out("early", frozenset({3}), "mt-5")
    await reports.world.look(5)
    await reports.say("job_ended", 1)
    reports.world.present_launchers = []
    await reports.world.look(2)
    origin = Origin("launcher", "node-1", job="mt-5", attempt=1)
    await reports.world.find("late", job="mt-5", origin=origin, line="failed (exitcode: 1) local_rank: 0 (pid: 12)")
    for _ in range(12):
        await reports.world.look(10)
    assert (await reports.verdicts(), reports.world.told) == ([], [])


async def test_output_of_a_job_whose_launcher_still_runs_is_no_failure() -> None:
    """A program can print another launcher's table. Where the launcher is gone too, the lines count."""
    reports = Reports()
    origin = Origin("launcher", "node-1", job="mt-5", attempt=1)
    reports.launcher()
    await reports.world.look(5)
    await reports.world.find("printed", job="mt-5", origin=origin, line="failed (exitcode: -6) local_rank: 3 (pid: 6)")
    await reports.world.time_out("timeout", frozenset({3}), "mt-5")
    for _ in range(60):
        reports.launcher()
        await reports.world.look(5)
    assert reports.world.told == []
    reports.world.present_launchers = []
    for _ in range(6):
        await reports.world.look(5)
    assert [cause for _, cause, _ in await reports.verdicts()] == ["hang"]


async def test_a_job_whose_steps_stop_hangs_though_its_launcher_is_running() -> None:
    """Its presence shows that; ten minutes later its launcher ends it, which is the same failure."""
    reports = Reports()
    world = reports.world
    for step in range(1, 8):
        reports.launcher()
        stepping(world, step)
        world.present_jobs = [Presence("mt-5", each.last_seen, each.details) for each in world.present_jobs]
        await world.look(5)
    await world.time_out("timeout", frozenset({3}), "mt-5")
    for _ in range(120):
        reports.launcher()
        await world.look(5)
    assert await reports.verdicts() == [(1, "hang", "low")]
    await reports.say("job_failed", 1, status=0, error="hang", reason="the job hung")
    for _ in range(3):
        await world.look(5)
    assert await reports.verdicts() == [(1, "hang", "low")]


async def test_a_hang_that_the_launcher_ended_is_a_hang() -> None:
    """How the ranks then ended, and that they were terminated, is no evidence."""
    reports = Reports()
    await reports.world.find(
        "stopped",
        job="mt-5",
        rule="rank-stopped",
        role=Role.TEARDOWN,
        cause=CauseClass.PREEMPTION,
        origin=Origin("launcher", "node-1", job="mt-5", attempt=1),
        line="Received Signals.SIGTERM death signal, shutting down workers",
    )
    await reports.say("job_failed", 1, status=0, error="hang", reason="the job hung")
    await reports.world.look(6)
    assert await reports.verdicts() == [(1, "hang", "low")]


@pytest.mark.parametrize(("attempt", "who"), [(1, "its launcher"), (None, "the job")])
async def test_a_report_without_a_status_is_a_failure_too(attempt: int | None, who: str) -> None:
    """It comes from a launcher of an earlier release, or from a job without a launcher."""
    reports = Reports()
    await reports.say("job_failed", attempt, reason="its process ended by OSError")
    await reports.world.look(6)
    (verdict,) = await reports.world.store.verdicts_of("mt-5", 5)
    (evidence,) = verdict.plain["evidence"]
    assert (evidence["line"], evidence["why"]) == ("its process ended by OSError", f"{who} reported it")


async def test_a_verdict_keeps_the_node_that_its_report_names() -> None:
    """The next attempt's ranks are on other nodes, which the job reports before the verdict is final."""
    reports = Reports()
    world = reports.world

    def place(*nodes: str) -> None:
        placed = [{"rank": rank, "node": node} for rank, node in enumerate(nodes)]
        world.present_jobs = [Presence("mt-5", world.clock.now(), {"placement": placed})]

    place("node-1", "node-1", "node-2", "node-2")
    await world.look(5)
    await reports.say("job_failed", 1, rank=1, status=-9, reason="rank 1 was ended by SIGKILL")
    await world.look(6)
    place("node-2", "node-2", "node-1", "node-1")
    await world.look(6)
    (verdict,) = await world.store.verdicts_of("mt-5", 5)
    assert "rank 1 (node-1) ended first, by SIGKILL" in str(verdict.plain)
    assert "node-2" not in str(verdict.plain)


async def test_a_launcher_whose_ranks_lost_a_remote_rank_names_no_first_rank() -> None:
    """The process that failed first was on another node, whose launcher does not speak for the job."""
    reports = Reports()
    await reports.say("job_failed", 1, error="RuntimeError", reason="rank 1 lost another rank (RuntimeError)")
    await reports.world.look(16)
    (verdict,) = await reports.world.store.verdicts_of("mt-5", 5)
    assert "ended first" not in str(verdict.plain)
    assert verdict.plain["evidence"][0]["line"] == "rank 1 lost another rank (RuntimeError)"


async def test_a_launcher_that_gives_up_reports_no_second_failure() -> None:
    """It reports one only if there was none: the command of a further attempt cannot be started."""
    reports = Reports()
    await reports.say("job_failed", 1, **KILLED)
    await reports.say("job_gone", 1, reason="it has failed once without progress, and --retries is 0")
    await reports.world.look(6)
    assert [attempt for attempt, _, _ in await reports.verdicts()] == [1]
    await reports.world.look(300)
    await reports.say("job_gone", 2, reason="its command cannot be started")
    await reports.world.look(6)
    assert [attempt for attempt, _, _ in await reports.verdicts()] == [1, 2]
    await reports.say("job_gone", None, reason="nothing has been heard of it")
    await reports.world.look(6)
    assert len(await reports.verdicts()) == 2


async def test_the_alert_of_a_failure_ends_when_the_job_has_succeeded() -> None:
    """Its next attempt succeeded. A failure after that fires again."""
    reports = Reports()
    await reports.say("job_failed", 1, **KILLED)
    await reports.world.look(6)
    await reports.say("job_ended", 2)
    await reports.world.look(2)
    assert [alert.status for alert in reports.world.told] == [AlertStatus.FIRING, AlertStatus.RESOLVED]
    await reports.world.look(120)
    assert len(reports.world.told) == 2
    await reports.say("job_failed", 3, **KILLED)
    await reports.world.look(6)
    assert reports.world.told[-1].status is AlertStatus.FIRING


async def test_a_report_that_is_hours_old_is_not_diagnosed() -> None:
    """A failure that is known from findings is treated in the same way."""
    reports = Reports()
    await reports.say("job_failed", 1, **KILLED)
    await reports.world.look(2 * 3600)
    assert await reports.verdicts() == []


def test_a_verdict_applies_only_to_the_report_of_its_own_attempt() -> None:
    """A verdict from before the previous report, or after which the job stepped, does not count."""
    world = World()
    now = world.clock.now()
    verdict = KnownVerdict("v1", "mt-5", 1, now, now, "hang", "low", None, "hang", {})
    report = reported_end.ReportedEnd("mt-5", now + timedelta(minutes=9), is_failure=True, attempt=1)
    within = timedelta(minutes=2)

    def found(before: Any = None, stepped_at: Any = None, **members: Any) -> KnownVerdict | None:
        told = reported_end.ReportedEnd(
            "mt-5", members.get("at", report.at), is_failure=True, attempt=members.get("attempt", 1)
        )
        return reported_end.verdict_of(told, before, [verdict], within, stepped_at)

    assert found() is verdict
    assert found(stepped_at=now + timedelta(minutes=1)) is None
    assert found(attempt=2) is None
    assert found(before=reported_end.ReportedEnd("mt-5", now + timedelta(minutes=1), is_failure=False)) is None
    assert found(attempt=None) is None
    assert found(attempt=None, at=now + timedelta(minutes=1)) is verdict
