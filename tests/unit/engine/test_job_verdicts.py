"""The verdicts that playbooks are told of: the newest of each job, while it counts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from msgspec.structs import replace

from tests.support.clocks import START, ManualClock
from tests.unit.diagnosis.test_job_diagnoses import World
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.domain.job_verdict import JobVerdict, VerdictsOnJob
from trainmedic_server.engine import scope, verdict_alert
from trainmedic_server.engine.job_diagnoses import JobDiagnoses
from trainmedic_server.engine.job_verdicts import JobVerdicts
from trainmedic_server.telemetry import Metrics

GPU, CODE = JobVerdict("gpu", "high", "isolate_node", "node-2", (9,)), JobVerdict("code", "medium", "restart")
WIRE = JobVerdict("network", "medium", "ask")
JOB = Target(TargetKind.JOB, job="llm-1")


def _alert(name: str = "TrainingLossSpike", **labels: str) -> Alert:
    at: datetime = START
    return Alert("f", AlertStatus.FIRING, {"alertname": name, **labels}, {"ranks": "3, 5", "advice": "stop"}, at, None)


def test_the_newest_of_each_job_counts_for_an_hour() -> None:
    """One that comes late of an earlier failure does not take its place."""
    clock = ManualClock()
    verdicts = JobVerdicts(clock)
    verdicts.take("llm-1", START, GPU)
    verdicts.take("llm-1", START - timedelta(minutes=5), CODE)
    assert verdicts.current() == {"llm-1": VerdictsOnJob(GPU)}
    clock.sleep(3601)
    assert verdicts.current() == {}


class Moment(datetime):
    """One in the middle of whose comparison something happens, as in another thread it may."""

    meanwhile: Callable[[], object] | None = None

    def _happens(self) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()

    def __lt__(self, other: datetime) -> bool:
        self._happens()
        return super().__lt__(other)

    def __ge__(self, other: datetime) -> bool:
        self._happens()
        return super().__ge__(other)


def test_one_thread_may_ask_while_another_takes_a_verdict_or_asks() -> None:
    """Admissions ask in the run store's thread while the event loop's makes verdicts and asks too: neither meets what
    the other has half done."""
    clock = ManualClock()
    verdicts = JobVerdicts(clock)
    began_at = Moment.fromisoformat(START.isoformat())
    verdicts.take("llm-1", began_at, GPU)
    began_at.meanwhile = lambda: verdicts.take("llm-2", START, CODE)
    assert verdicts.current() == {"llm-1": VerdictsOnJob(GPU)}
    assert verdicts.current() == {"llm-1": VerdictsOnJob(GPU), "llm-2": VerdictsOnJob(CODE)}
    clock.sleep(3601)
    began_at.meanwhile = verdicts.current
    assert verdicts.current() == {}


def test_a_slow_job_takes_no_failure_its_verdict_and_the_other_way_round() -> None:
    """Of the attempt after a failure it says nothing of that failure; each alert sees what it is about, and one of
    neither the failure first. A quarter of an hour later the job is slow again, which changes nothing."""
    verdicts = JobVerdicts(ManualClock())
    verdicts.take("llm-1", START, GPU)
    for minutes in (5, 20):
        verdicts.take("llm-1", START + timedelta(minutes=minutes), WIRE, is_slow=True)
    verdicts.take("slow-1", START, WIRE, is_slow=True)
    verdicts.take("dead-1", START, GPU)
    known = verdicts.current()
    for name, failed, slow, dead in (
        ("TrainingHang", "gpu", "network", "gpu"),
        ("MyOwnAlert", "gpu", "network", "gpu"),
        ("TrainingStraggler", "network", "network", None),
        ("TrainingThroughputDrop", "network", "network", None),
    ):
        seen = [
            scope.of_job(Target(TargetKind.JOB, job=job), _alert(name), known)["verdict"]["cause"]
            for job in ("llm-1", "slow-1", "dead-1")
        ]
        assert seen == [failed, slow, dead], name


def test_a_run_sees_the_verdict_on_its_job_and_else_nothing_is_an_error() -> None:
    """Of another job, or of a target that is no job, there is none."""
    assert scope.of_job(JOB, _alert(), {"llm-1": VerdictsOnJob(GPU)})["verdict"]["node"] == "node-2"
    for target in (JOB, Target(TargetKind.NODE, node="llm-2"), None):
        empty = scope.of_job(target, _alert(), {"llm-2": VerdictsOnJob(GPU)})["verdict"]
        assert empty == {"cause": None, "confidence": None, "advice": None, "node": None, "ranks": []}


def test_the_alert_of_a_verdict_says_it_for_the_whole_run() -> None:
    """Whatever is found out later; and only the server's own alert does."""
    told = _alert("TrainingFailed", source="diagnosis", cause="code", confidence="high")
    assert verdict_alert.verdict_of(told) == JobVerdict("code", "high", "stop", None, (3, 5))
    assert scope.of_job(JOB, told, {"llm-1": VerdictsOnJob(GPU)})["verdict"]["cause"] == "code"
    assert verdict_alert.verdict_of(_alert("TrainingFailed", cause="gpu", node="n")) is None
    odd = replace(told, annotations={**told.annotations, "ranks": f"{'9' * 5000}, x, 3"})
    assert verdict_alert.verdict_of(odd) == JobVerdict("code", "high", "stop", None, (3,))


async def test_a_verdict_that_is_made_is_there_at_once_and_after_a_restart() -> None:
    """The playbooks on its alert see it; a server that starts later takes it from the store."""
    world = World()
    verdicts, later = JobVerdicts(world.clock), JobVerdicts(world.clock)
    every = timedelta(minutes=1)
    watching = JobDiagnoses(world.store, world, world, world.clock, Metrics(), every, verdicts=verdicts)  # type: ignore[arg-type]
    await world.find("f1", ranks=frozenset({2}))
    world.clock.sleep(11)
    await watching.look()
    (known,) = verdicts.current().values()
    made = known.failure
    assert made is not None
    assert known.slowness is None
    assert (made.cause, made.advice) == ("unknown", "restart")
    await later.load(world.store)
    assert later.current() == verdicts.current()
