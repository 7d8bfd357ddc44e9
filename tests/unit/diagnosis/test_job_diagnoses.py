"""A server's verdicts: when they are made, what is stored, and what is told."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any
from unittest.mock import ANY

import pytest
from msgspec.structs import replace

from tests.support.clocks import START, ManualClock
from trainmedic_core.target import Target, TargetKind
from trainmedic_logs.diagnosis.facts import Facts
from trainmedic_logs.diagnosis.verdict import Verdict
from trainmedic_logs.domain.finding import CauseClass, Excerpt, Origin, Role
from trainmedic_logs.domain.known_finding import EpisodeKey, FindingEnd, JobPlace, KnownExcerpt, KnownFinding
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.domain.job_life import JobLife, LifeState
from trainmedic_server.engine import job_diagnoses
from trainmedic_server.engine.job_diagnoses import JobDiagnoses
from trainmedic_server.errors import BusUnavailable
from trainmedic_server.ports.outside import Presence
from trainmedic_server.telemetry import Metrics


class World:
    """A server's store, the presences of jobs and agents, and the alerts that were told."""

    def __init__(self) -> None:
        self.store = InMemoryStore()
        self.clock = ManualClock()
        self.told: list[Alert] = []
        self.refused: list[str] = []  # alertnames
        self.refuses_all_but = ""  # an alertname
        self.present_jobs: list[Presence] = []
        self.present_launchers: list[Presence] = []
        self.nodes = ["node-1", "node-2"]
        self.is_refusing = False
        self.ids = count()
        self.start_again()

    def start_again(self) -> None:
        """A server starts that has only the store."""
        self.diagnoses = JobDiagnoses(
            self.store,
            self,  # type: ignore[arg-type]
            self,
            self.clock,
            Metrics(),
            timedelta(minutes=1),
            lambda: f"v{next(self.ids)}",
        )

    async def jobs(self) -> list[Presence]:
        return self.present_jobs

    async def launchers(self) -> list[Presence]:
        return self.present_launchers

    async def agents(self) -> list[Presence]:
        return [Presence(node, self.clock.now()) for node in self.nodes]

    async def tell(self, alerts: Sequence[Alert]) -> None:
        if self.is_refusing or (self.refuses_all_but and alerts[0].name != self.refuses_all_but):
            self.refused += [alert.name for alert in alerts]
            raise BusUnavailable("the Alertmanager is away")
        self.told += alerts

    async def look(self, seconds: float = 0) -> None:
        """Look, after so many seconds."""
        self.clock.sleep(seconds)
        await self.diagnoses.look()

    async def find(self, finding_id: str, **members: Any) -> None:
        """A finding arrives."""
        now = self.clock.now()
        job = members.pop("job", "llm-1")
        bare = KnownFinding(
            id=finding_id,
            rule="rank-failed",
            role=Role.CASCADE,
            cause=CauseClass.UNKNOWN,
            target=Target(TargetKind.JOB, job=job),
            origin=Origin("launcher", "node-1", job=job, attempt=1),
            line="failed (exitcode: -9) local_rank: 0 (pid: 12) of binary: /usr/bin/python",
            first_at=now,
            last_at=now,
            heard_first_at=now,
            heard_at=now,
            nodes=frozenset({"node-1"}),
            is_printed=True,
        )
        known = replace(bare, **members)
        await self.store.transact(lambda tx: tx.findings.save([known]))

    async def time_out(self, finding_id: str, ranks: frozenset[int], job: str = "llm-1") -> None:
        """Ranks on node-1 time out in a collective."""
        line = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE)"
        await self.find(finding_id, job=job, rule="nccl-timeout", cause=CauseClass.HANG, ranks=ranks, line=line)

    async def end(self, *codes: int, first_rank: int = 0) -> None:
        """The launcher of node-1 tells how its ranks ended."""
        table = [
            row
            for local, code in enumerate(codes)
            for row in (
                f"[{local}]:",
                f"  rank      : {first_rank + local} (local_rank: {local})",
                f"  exitcode  : {code} (pid: {20 + local})",
            )
        ]
        await self.find("table", rule="launcher-table", role=Role.CONFIRMATION, line=table[0])
        key = EpisodeKey("node-1", "table")
        lines = Excerpt(tuple(table), 0)
        excerpt = KnownExcerpt("table", key, "launcher", "launcher.log", None, self.clock.now(), lines)
        await self.store.transact(lambda tx: tx.findings.save_excerpts([excerpt]))

    async def lose_a_card(self, job: str = "llm-1") -> None:
        """The kernel of node-2 loses a card of the job, and then a collective times out."""
        placed = [{"rank": 0, "node": "node-1"}, {"rank": 1, "node": "node-2", "gpu": "GPU-5f3a"}]
        self.present_jobs = [Presence(job, self.clock.now(), {"placement": placed})]
        await self.look(5)
        await self.find(
            f"xid-{job}-{self.clock.now()}",
            rule="xid",
            role=Role.ROOT,
            cause=CauseClass.GPU,
            target=Target(TargetKind.GPU, node="node-2", gpu="GPU-5f3a"),
            origin=Origin("kernel", "node-2"),
            nodes=frozenset({"node-2"}),
            is_printed=False,
            line="NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus.",
            labels={"at": str(self.clock.now())},
        )
        await self.time_out(f"timeout-{job}", frozenset({0}), job)
        self.present_jobs = []


async def test_a_verdict_is_made_and_reported_five_seconds_after_the_first_sign() -> None:
    """It has the node that its kernel names; the alert keeps its labels while it fires, and ends."""
    world = World()
    await world.lose_a_card()
    await world.look(4)
    assert await world.store.verdicts_of("llm-1", 5) == []
    await world.look(2)
    (verdict,) = await world.store.verdicts_of("llm-1", 5)
    assert (verdict.cause, verdict.node, verdict.confidence, verdict.attempt) == ("gpu", "node-2", "high", 1)
    assert verdict.plain["ranks"] == [1]
    (alert,) = world.told
    assert dict(alert.labels) == {
        "alertname": "TrainingFailed",
        "severity": "critical",
        "component": "training",
        "source": "diagnosis",
        "job_name": "llm-1",
        "cause": "gpu",
        "confidence": "high",
        "node": "node-2",
    }
    assert alert.annotations["advice"] == "isolate_node"
    await world.look(30)
    assert len(world.told) == 1
    await world.look(60)
    assert [each.status for each in world.told] == [AlertStatus.FIRING] * 2
    await world.look(900)
    assert world.told[-1].status is AlertStatus.RESOLVED
    await world.look(600)
    assert len(world.told) == 3


MOVED = {"instance": "b", "placement": [{"rank": 0, "node": "node-1"}, {"rank": 1, "node": "node-3", "gpu": "GPU-aa"}]}


@pytest.mark.parametrize("seconds", [0, 20])
async def test_a_verdict_keeps_its_node_when_the_job_runs_elsewhere(seconds: int) -> None:
    """The next attempt starts before the verdict, or during its updates, in which signs are seen again."""
    world = World()
    await world.lose_a_card()
    if seconds:
        await world.look(6)
    world.present_jobs = [Presence("llm-1", world.clock.now(), MOVED)]
    for _ in range(3):
        await world.look(6)
    (verdict,) = await world.store.verdicts_of("llm-1", 5)
    assert (verdict.cause, verdict.node, verdict.plain["ranks"]) == ("gpu", "node-2", [1])
    assert [alert.labels["node"] for alert in world.told] == ["node-2"]


async def test_a_verdict_keeps_its_node_when_findings_end() -> None:
    """They end by a restart of the node, or by the steps of a job without numbered attempts."""
    world = World()
    await world.lose_a_card()
    await world.look(6)
    await end_findings(world, "xid")
    await world.look(6)
    (verdict,) = await world.store.verdicts_of("llm-1", 5)
    assert (verdict.cause, verdict.node) == ("gpu", "node-2")
    assert verdict.made_at == verdict.began_at + timedelta(seconds=6)


async def test_a_finding_that_turns_out_unconfirmed_is_removed_from_the_verdict() -> None:
    """It was no fault."""
    world = World()
    await world.lose_a_card()
    await world.look(6)
    await end_findings(world, "xid", FindingEnd.UNCONFIRMED)
    await world.look(6)
    (verdict,) = await world.store.verdicts_of("llm-1", 5)
    assert (verdict.cause, verdict.node) == ("hang", None)


async def end_findings(world: World, rule: str, because: FindingEnd = FindingEnd.BOOT) -> None:
    def end(tx: Any) -> None:
        own = [each for each in tx.findings.all_open() if each.rule == rule]
        tx.findings.save([replace(each, ended_at=world.clock.now(), ended_because=because) for each in own])

    await world.store.transact(end)


async def test_a_restarted_server_that_knows_less_weakens_no_verdict() -> None:
    """The job and its ranks' locations are gone. Before the verdict, the job's stored locations count."""
    world = World()
    await world.lose_a_card()
    await world.look(6)
    world.start_again()
    for _ in range(3):
        await world.look(6)
    (verdict,) = await world.store.verdicts_of("llm-1", 5)
    assert (verdict.cause, verdict.node) == ("gpu", "node-2")
    world = World()
    await world.lose_a_card()
    places = {JobPlace("llm-1", "node-2"): world.clock.now()}
    await world.store.transact(lambda tx: tx.findings.save_job_places(places))
    world.start_again()
    await world.look(6)
    (verdict,) = await world.store.verdicts_of("llm-1", 5)
    assert verdict.cause == "gpu"
    assert "node-2" in verdict.plain["summary"]


@pytest.mark.parametrize("later", [[], [Presence("llm-1", START, MOVED)]])
@pytest.mark.parametrize("code", [-7, -11])
async def test_a_restarted_server_renames_no_node(code: int, later: list[Presence]) -> None:
    world = World()
    placed = [{"rank": 0, "node": "node-1"}, {"rank": 1, "node": "node-2"}]
    world.present_jobs = [Presence("llm-1", START, {"placement": placed})]
    await world.look(5)
    await world.end(-15, code)
    await world.look(6)
    (before,) = await world.store.verdicts_of("llm-1", 5)
    assert "rank 1 (node-2)" in before.plain["summary"]
    world.present_jobs = later
    world.start_again()
    for _ in range(3):
        await world.look(6)
    assert await world.store.verdicts_of("llm-1", 5) == [replace(before, tell_at=ANY)]


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_late_evidence_changes_the_verdict_and_not_the_alert(is_restarted: bool) -> None:
    """The kernel explains a bare SIGKILL half a minute later: one verdict, one alert."""
    world = World()
    await world.find("f1")
    await world.look(11)
    (before,) = await world.store.verdicts_of("llm-1", 5)
    assert (before.cause, before.confidence) == ("unknown", "low")
    if is_restarted:
        world.start_again()
    await world.find(
        "f2",
        rule="host-oom",
        role=Role.ROOT,
        cause=CauseClass.HOST_MEMORY,
        target=Target(TargetKind.NODE, node="node-1"),
        origin=Origin("kernel", "node-1"),
        fields={"pid": "12"},
        is_printed=False,
        line="Out of memory: Killed process 12 (python)",
    )
    await world.look(20)
    (after,) = await world.store.verdicts_of("llm-1", 5)
    assert (after.id, after.cause, after.labels) == (before.id, "host_memory", before.labels)
    assert len(world.told) == 1


async def test_an_earlier_kill_of_a_neighbour_does_not_hide_that_of_the_jobs_process() -> None:
    """Both are one finding, which began with the neighbour's; the excerpts state which process each is about."""
    world = World()
    now = world.clock.now()
    lines = {"a": "Out of memory: Killed process 7 (java)", "b": "Memory cgroup out of memory: Killed process 12 (py)"}
    await world.find(
        "oom",
        rule="host-oom",
        role=Role.ROOT,
        cause=CauseClass.HOST_MEMORY,
        target=Target(TargetKind.NODE, node="node-1"),
        origin=Origin("kernel", "node-1"),
        fields={"pid": "7"},
        is_printed=False,
        line=lines["a"],
        first_at=now - timedelta(seconds=50),
    )
    kills = [
        KnownExcerpt("oom", EpisodeKey("node-1", name), "kernel", "kmsg", None, at, Excerpt(("before", line), 1))
        for (name, line), at in zip(lines.items(), (now - timedelta(seconds=50), now), strict=True)
    ]
    await world.store.transact(lambda tx: tx.findings.save_excerpts(kills))
    await world.find("f1")
    await world.look(11)
    (verdict,) = await world.store.verdicts_of("llm-1", 5)
    assert (verdict.cause, verdict.confidence) == ("host_memory", "high")
    assert verdict.plain["evidence"][0]["line"] == lines["b"]


async def test_silent_ranks_are_known_from_the_launcher_table() -> None:
    """Three of four ranks time out in a collective; only the launcher's table states that there is a fourth."""
    world = World()
    await world.time_out("timeout", frozenset({0, 1, 3}))
    await world.end(-15, 1, -15, -15)
    await world.look(11)
    (verdict,) = await world.store.verdicts_of("llm-1", 5)
    assert (verdict.cause, verdict.confidence, verdict.plain["ranks"]) == ("hang", "medium", [2])


async def test_a_rank_known_only_locally_is_resolved_by_the_launcher_table() -> None:
    """A thread's exception has no rank before it; node-1 has the ranks from 8 on."""
    world = World()
    origin = Origin("training", "node-1", job="llm-1", attempt=1, local_rank=1)
    await world.find(
        "f1", rule="python-exception", role=Role.ROOT, cause=CauseClass.CODE, line="KeyError", origin=origin
    )
    await world.end(-15, 1, first_rank=8)
    await world.look(11)
    (verdict,) = await world.store.verdicts_of("llm-1", 5)
    assert (verdict.cause, verdict.plain["ranks"]) == ("code", [9])


async def test_silent_ranks_are_known_from_the_jobs_stated_rank_count() -> None:
    """A number that no job has states nothing, and costs nothing."""
    for size, confidence, ranks in ((4, "medium", [2]), (10**12, "low", []), ("4", "low", [])):
        world = World()
        world.present_jobs = [Presence("llm-1", world.clock.now(), {"world_size": size})]
        await world.look(5)
        await world.time_out("timeout", frozenset({0, 1, 3}))
        await world.look(11)
        (verdict,) = await world.store.verdicts_of("llm-1", 5)
        assert (verdict.cause, verdict.confidence, verdict.plain["ranks"]) == ("hang", confidence, ranks)


async def test_an_exception_alone_is_no_failure() -> None:
    """Many loops catch it. Diagnosis starts when a process ended, a collective timed out, or the job is gone."""
    world = World()
    await world.find("f1", rule="cuda-oom", role=Role.ROOT, cause=CauseClass.GPU_MEMORY, ranks=frozenset({3}))
    await world.look(60)
    assert await world.store.verdicts_of("llm-1", 5) == []
    gone = JobLife("llm-1", LifeState.GONE, world.clock.now())
    await world.store.transact(lambda tx: tx.save_job_lives([gone]))
    await world.look(11)
    (verdict,) = await world.store.verdicts_of("llm-1", 5)
    assert verdict.cause == "gpu_memory"


async def test_output_that_a_successful_attempt_also_had_means_nothing() -> None:
    """An exception that this job always prints is not what ended it."""
    world = World()
    usual: dict[str, Any] = {"rule": "python-exception", "role": Role.ROOT, "cause": CauseClass.CODE, "shape": "5f3a"}
    for attempt in (1, 2):
        origin = Origin("training", "node-1", job="llm-1", attempt=attempt, rank=3)
        ended_at = world.clock.now() if attempt == 1 else None
        line = "KeyError: 'wandb'"
        await world.find(f"usual-{attempt}", **usual, origin=origin, line=line, ended_at=ended_at)
    await world.look(3)
    await world.find("f1", origin=Origin("launcher", "node-1", job="llm-1", attempt=2))
    await world.look(11)
    (verdict,) = await world.store.verdicts_of("llm-1", 5)
    assert (verdict.cause, verdict.attempt) == ("unknown", 2)


async def test_repeated_failures_are_counted_and_a_restarted_server_reports_none_twice() -> None:
    """Each failure has its own verdict; another watch over the same store continues where the first was."""
    world = World()
    await world.find("f1")
    await world.look(11)
    again = JobDiagnoses(world.store, world, world, world.clock, Metrics(), timedelta(minutes=1))  # type: ignore[arg-type]
    await again.look()
    assert (len(await world.store.verdicts_of("llm-1", 5)), len(world.told)) == (1, 1)
    known = await world.store.transact(lambda tx: tx.findings.with_ids(["f1"]))
    over = replace(known["f1"], ended_at=world.clock.now())
    await world.store.transact(lambda tx: tx.findings.save([over]))
    world.clock.sleep(600)
    await world.find("f2")
    await world.look(11)
    newest, oldest = await world.store.verdicts_of("llm-1", 5)
    assert (newest.plain["same_before"], oldest.plain["same_before"]) == (1, 0)


async def test_a_failure_of_the_day_before_is_not_diagnosed_now() -> None:
    """A server that starts finds jobs gone since yesterday; the cluster has changed since they failed."""
    world = World()
    gone = JobLife("llm-1", LifeState.GONE, world.clock.now())
    await world.store.transact(lambda tx: tx.save_job_lives([gone]))
    await world.look(2 * 3600)
    assert (await world.store.verdicts_of("llm-1", 5), world.told) == ([], [])


async def test_an_alert_that_is_not_accepted_is_sent_later() -> None:
    """The verdict is stored first."""
    world = World()
    world.is_refusing = True
    await world.find("f1")
    world.clock.sleep(11)
    with contextlib.suppress(BusUnavailable):
        await world.diagnoses.look()
    assert len(await world.store.verdicts_of("llm-1", 5)) == 1
    world.is_refusing = False
    await world.look(5)
    assert [alert.labels["alertname"] for alert in world.told] == ["TrainingFailed"]


async def test_a_node_that_is_lost_with_its_ranks_is_the_culprit() -> None:
    """Its agent fell silent before the others timed out."""
    world = World()
    placed = [{"rank": rank, "node": f"node-{1 + rank // 4}"} for rank in range(8)]
    # A job can state any number.
    placed += [{"rank": rank, "node": "node-2"} for rank in (-1, 10**6, 2**70)]
    world.present_jobs = [Presence("llm-1", START, {"placement": placed})]
    await world.look()
    world.nodes = ["node-1"]
    await world.look(60)
    await world.time_out("f1", frozenset(range(4)))
    await world.look(11)
    (verdict,) = await world.store.verdicts_of("llm-1", 5)
    assert (verdict.cause, verdict.node, verdict.plain["ranks"]) == ("node", "node-2", [4, 5, 6, 7])


async def test_old_job_locations_are_forgotten_after_hours() -> None:
    """A name may come back on other nodes."""
    for hours, node in ((1, "node-2"), (3, None)):
        world = World()
        world.present_jobs = [Presence("llm-1", START, {"placement": [{"rank": 1, "node": "node-2"}]})]
        await world.look(5)
        world.present_jobs = []
        await world.look(hours * 3600)
        await world.find(
            "xid",
            rule="xid",
            role=Role.ROOT,
            cause=CauseClass.GPU,
            target=Target(TargetKind.GPU, node="node-2", gpu="GPU-5f3a"),
            origin=Origin("kernel", "node-2"),
            nodes=frozenset({"node-2"}),
            is_printed=False,
        )
        await world.time_out("timeout", frozenset({0}))
        await world.look(6)
        (verdict,) = await world.store.verdicts_of("llm-1", 5)
        assert verdict.node == node


def suspects(world: World) -> list[Alert]:
    return [alert for alert in world.told if alert.name == "NodeSuspect"]


def fail_diagnosis_of(monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    judge = job_diagnoses.diagnose

    def diagnose(facts: Facts) -> Verdict:
        if facts.job == job:
            raise ValueError("no sense")
        return judge(facts)

    monkeypatch.setattr(job_diagnoses, "diagnose", diagnose)


async def fail_three_jobs(world: World, **at_last: Any) -> None:
    """On one node, a day apart. The world becomes `at_last` before the last one's verdict."""
    for number in range(3):
        await world.lose_a_card(f"llm-{number}")
        for name, value in at_last.items() if number == 2 else ():
            setattr(world, name, value)
        with contextlib.suppress(BusUnavailable):
            await world.look(11)
        if number < 2:
            await world.look(86400)


async def test_a_node_on_which_three_jobs_failed_is_suspect() -> None:
    """All within thirty days, whatever was repaired each time; two jobs are not enough."""
    world = World()
    await fail_three_jobs(world)
    (alert,) = suspects(world)
    assert alert.labels["node"] == "node-2"
    assert "llm-0, llm-1, llm-2" in alert.annotations["summary"]


async def test_a_suspect_node_that_cannot_be_reported_is_reported_later() -> None:
    """The verdict that names it is stored by then."""
    world = World()
    for number in range(3):
        await world.lose_a_card(f"llm-{number}")
        world.is_refusing = number == 2
        with contextlib.suppress(BusUnavailable):
            await world.look(11)
        world.is_refusing = False
        await world.look(60)
        await world.look(86400)
    assert len([alert for alert in world.told if alert.labels["alertname"] == "NodeSuspect"]) == 1


async def test_a_suspect_node_is_reported_by_the_server_after_a_killed_one() -> None:
    """The first server stored the verdict that names it, and reported nothing."""
    world = World()
    await fail_three_jobs(world, is_refusing=True)
    world.is_refusing = False
    world.start_again()
    await world.look(30)
    assert len(suspects(world)) == 1


async def test_a_restarted_server_does_not_report_a_suspect_again() -> None:
    """This also holds after a downtime in which the verdict's own alert became due."""
    world = World()
    await fail_three_jobs(world)
    await world.look(200)
    for _ in range(3):
        world.start_again()
        await world.look(300)
    assert len(suspects(world)) == 1


async def test_a_suspect_that_is_reported_again_is_the_same_alert() -> None:
    """It is reported again if the server ends before the verdict's own alert is sent."""
    world = World()
    await fail_three_jobs(world, refuses_all_but="NodeSuspect")
    world.start_again()
    with contextlib.suppress(BusUnavailable):
        await world.look(30)
    first, again = suspects(world)
    assert again.identity == first.identity


async def test_a_suspect_node_is_tried_once_per_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """While Alertmanager is down, other jobs do not add attempts; each failure is reported."""
    world = World()
    for number in range(3):
        await world.lose_a_card(f"llm-{number}")
        if number < 2:
            await world.look(11)
            world.clock.sleep(86400)
    for number in range(5):
        await world.find(f"other-{number}", job=f"other-{number}")
    fail_diagnosis_of(monkeypatch, "other-3")
    world.is_refusing = True
    with pytest.raises(ExceptionGroup) as raised:
        await world.look(11)
    assert world.refused.count("NodeSuspect") == 1
    diagnosis, sending = raised.value.exceptions
    assert (str(diagnosis), diagnosis.__notes__) == ("no sense", ["in the diagnosis of other-3"])
    assert isinstance(sending, BusUnavailable)
    assert not hasattr(sending, "__notes__")


async def test_a_job_that_cannot_be_diagnosed_delays_no_alert_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alerts on other jobs' failures and nodes are on time; the error is reported each time."""
    fail_diagnosis_of(monkeypatch, "bad")
    world = World()
    for number in range(3):
        await world.lose_a_card(f"llm-{number}")
        await world.find("bad", job="bad")
        for _ in range(2):
            with pytest.raises(ValueError, match="no sense") as raised:
                await world.look(11)
            assert raised.value.__notes__ == ["in the diagnosis of bad"]
        if number < 2:
            world.clock.sleep(86400)
    told = [alert.labels for alert in world.told]
    assert {labels.get("job_name") for labels in told} == {"llm-0", "llm-1", "llm-2", None}
    assert [labels["node"] for labels in told if labels["alertname"] == "NodeSuspect"] == ["node-2"]


def test_the_diagnosis_times_are_consistent() -> None:
    """An alert fires for longer than its verdict may change."""
    assert job_diagnoses.SETTLING < job_diagnoses.UPDATED_FOR < job_diagnoses.ALERT_LASTS


def stepping(world: World, step: int, instance: str = "a") -> None:
    """The job is there, and has completed a step."""
    details = {"step": step, "instance": instance}
    world.present_jobs = [Presence("llm-1", world.clock.now(), details)]


async def step_for(world: World, seconds: int, first: int, each: int = 5) -> int:
    """Complete a step every few seconds; return the last one."""
    for number in range(seconds // each):
        stepping(world, first + number)
        await world.look(each)
    return first + seconds // each - 1


async def test_a_job_that_steps_has_not_failed() -> None:
    """It prints that a collective timed out and that an actor died, and continues."""
    world = World()
    last = await step_for(world, 30, 1)
    await world.time_out("f1", frozenset({3}))
    await world.find("f2", line="ray.exceptions.ActorDiedError: The actor died unexpectedly")
    await step_for(world, 300, last + 1)
    assert world.told == []


async def test_a_job_whose_steps_stop_has_failed() -> None:
    """It counts as failed after the time of two of its steps, and no later."""
    world = World()
    await step_for(world, 30, 1)
    await world.time_out("f1", frozenset({3}))
    for _ in range(15):
        await world.look(2)
    assert [alert.labels["cause"] for alert in world.told][:1] == ["hang"]


async def test_the_steps_of_another_process_do_not_disprove_the_end_of_the_first() -> None:
    """The job was started again after it had timed out."""
    world = World()
    last = await step_for(world, 30, 1)
    await world.time_out("f1", frozenset({3}))
    for number in range(12):
        stepping(world, last - 3 + number, instance="b")
        await world.look(5)
    assert world.told


async def test_a_launcher_statement_is_certain() -> None:
    """Its table ends the job, whatever step was seen last."""
    world = World()
    await step_for(world, 30, 1)
    await world.end(-9)
    await world.look(6)
    assert world.told
