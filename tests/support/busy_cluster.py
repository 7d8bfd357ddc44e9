"""A cluster after a busy day, for tests of what shows it: GPU UUIDs, names of 60 characters, other scripts, 200 runs.

The store is the server's own. What it does not model: an engine, so nothing of it goes on by itself.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from tests.support.api_world import World
from tests.support.clocks import START
from tests.support.memory_api import MemoryBook
from trainmedic.wire.envelope import new_id
from trainmedic_core import yaml_text
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain.agent_life import AgentLife
from trainmedic_server.domain.alert import Alert, AlertRecord, AlertStatus
from trainmedic_server.domain.approval import StepAhead, Terms
from trainmedic_server.domain.effect import Effect, EffectVerdict
from trainmedic_server.domain.job_life import JobLife, LifeState
from trainmedic_server.domain.modes import Mode, UndoTrigger
from trainmedic_server.domain.playbook import Playbook
from trainmedic_server.domain.reaction import Reaction
from trainmedic_server.domain.run import (
    Attempt,
    Decision,
    Event,
    Run,
    Status,
    StepState,
    StepStatus,
    Undo,
    UndoStatus,
)
from trainmedic_server.ports.outside import Presence

_PLAYBOOKS = Path(__file__).parents[2] / "playbooks"
_BOOKS = ("gpu-temperature-high", "training-loss-spike", "training-hang", "node-down", "gpu-memory-usage-high")
NODES = (
    "node-1",
    "node-2",
    "ip-10-12-133-217.eu-central-1.compute.internal",
    "gpu-h100-sxm5-rack-07-chassis-03-slot-11.hpc.example.internal",
    "計算ノード-07",
)
LONG_JOB = "nlp-llama3-70b-continued-pretraining-run-20260131-master-0-7f9"
UNICODE_JOB = "團隊/多模態-預訓練-第3期-größer"
JOBS = ("llm-3", LONG_JOB, UNICODE_JOB)
RUNS = 200
_LONG = (
    "The agent of gpu-h100-sxm5-rack-07-chassis-03-slot-11.hpc.example.internal refused it: "
    "policy.max_power_changes_per_hour=4 is reached until 12:41:07Z (changes: 11:02:11Z,11:17:45Z,11:31:02Z,11:41:07Z)"
)


def gpu_uuid(node: str, index: int) -> str:
    """The name that the driver gives to this GPU."""
    return f"GPU-{uuid.UUID(bytes=hashlib.sha256(f'{node}/{index}'.encode()).digest()[:16])}"


def gpu(node: str, index: int) -> Target:
    return Target(TargetKind.GPU, node=node, gpu=gpu_uuid(node, index))


def job(name: str) -> Target:
    return Target(TargetKind.JOB, job=name)


def agent(node: str) -> Presence:
    """As an agent describes eight GPUs; the last has a problem and two carry a pod."""
    cards: list[dict[str, Any]] = []
    for index in range(8):
        limits = {"default_limit_watts": 700.0, "min_limit_watts": 200.0, "max_limit_watts": 700.0}
        card: dict[str, Any] = {
            "index": index,
            "uuid": gpu_uuid(node, index),
            "name": "NVIDIA H100 80GB HBM3",
            "pci_bus_id": f"00000000:{0x1B + index:02X}:00.0",
            "power_limit_watts": 560.0 if index == 3 else 700.0,
            **limits,
        }
        if index < 2:
            card["pods"] = [f"team-nlp/{LONG_JOB}"]
        if index == 7:
            card = {**card, "problem": "NVML: GPU is lost (Xid 79 at 11:52:10Z)"}
        cards.append(card)
    details = {"node": node, "version": "0.3.0", "driver": "550.90.07", "gpus": cards, "policy": "standard"}
    return Presence(node, START - timedelta(seconds=2), details)


def job_presence(name: str, step: int) -> Presence:
    placement = [{"rank": rank, "node": NODES[rank // 8 % 4], "gpu": rank % 8} for rank in range(32)]
    losses = {
        "ranks": 32,
        "steps": [step, step],
        "lowest": {"rank": 4, "loss": 2.0313, "node": NODES[0]},
        "median": 2.0571,
        "highest": {"rank": 21, "loss": 2.0913, "node": NODES[2]},
        "curve": [2.0313 + 0.002 * each for each in range(32)],
    }
    return Presence(
        name,
        START - timedelta(seconds=3),
        {
            "job": name,
            "world_size": 32,
            "ranks": list(range(32)),
            "placement": placement,
            "capabilities": {"job.rollback": "live", "job.scale_lr": "live", "job.checkpoint": "live"},
            "interrupts_hangs": True,
            "namespace": "team-nlp",
            "version": "0.3.0",
            "step": step,
            "losses": losses,
        },
    )


class Case(Struct, frozen=True):
    """A run, its alert, and what else is known of it."""

    run: Run
    alert: AlertRecord
    effect: Effect | None = None


def _attempt(at: datetime, **changes: Any) -> Attempt:
    ended = {"status": "applied", "ended_at": at + timedelta(seconds=1), **changes}
    return replace(Attempt(1, new_id(), at, at + timedelta(seconds=30)), **ended)


def cap(at: datetime, undo: UndoStatus = UndoStatus.ARMED, **changes: Any) -> StepState:
    """A power limit that was lowered to 560 W."""
    attempt = _attempt(at)
    back = Undo(UndoTrigger.ON_RESOLVE, "gpu.power_limit", {"percent": 100}, attempt.command_id, undo)
    if undo is UndoStatus.DONE:
        back = replace(back, attempts=(_attempt(at + timedelta(minutes=9)),), because="the alert resolved")
    return replace(
        StepState(
            "steps",
            0,
            "cap",
            "action",
            "gpu.power_limit",
            StepStatus.SUCCEEDED,
            {"percent": 80},
            (attempt,),
            {"previous_watts": 700.0, "limit_watts": 560.0, "lease_seconds": 120.0},
            started_at=at,
            ended_at=at + timedelta(seconds=1),
            undo=back,
        ),
        **changes,
    )


def _wait(at: datetime, status: StepStatus, **changes: Any) -> StepState:
    state = StepState("steps", 1, "settled", "wait_for", None, status, {"wait_for": "resolved"}, started_at=at)
    return replace(state, deadline=at + timedelta(minutes=3), **changes)


def _alert(number: int, name: str, target: Target | None, at: datetime, resolved: bool) -> AlertRecord:
    labels = {"alertname": name, "severity": "critical", "prometheus": "monitoring/kube-prometheus-stack-prometheus"}
    if target is not None:
        named = {"node": target.node, "gpu": target.gpu, "job_name": target.job}
        labels |= {label: value for label, value in named.items() if value}
    labels |= {"pod": f"{LONG_JOB}", "summary_de": "GPU überhitzt – bitte Lüfter prüfen"}
    alert = Alert(
        hashlib.sha256(str(number).encode()).hexdigest()[:16],
        AlertStatus.RESOLVED if resolved else AlertStatus.FIRING,
        labels,
        {"summary": f"{name} on {target.key if target else 'nothing known'}", "runbook_url": "https://wiki.example/r"},
        at,
        generator_url="https://prometheus.example/graph?g0.expr=gpu_temperature_celsius",
    )
    ended = {"resolved_at": at + timedelta(minutes=10), "resolved_because": "alertmanager"} if resolved else {}
    return AlertRecord(alert, at, at + timedelta(minutes=1), 3, **ended)


def _run(number: int, at: datetime, alert: AlertRecord, book: str, target: Target | None, **changes: Any) -> Run:
    return Run(
        id=new_id(int(at.timestamp() * 1000)),
        playbook=book,
        version="4fb6f4a3c1d2",
        target=target,
        mode=changes.pop("mode", Mode.ENFORCE),
        decision=changes.pop("decision", Decision.STARTED),
        alert=alert.identity,
        alert_name=alert.alert.name,
        alert_labels=alert.alert.labels,
        created_at=at,
        **changes,
    )


def _past(number: int, at: datetime) -> Case:
    """The run of this number; each kind comes again after twelve."""
    node = NODES[number % len(NODES)]
    later = at + timedelta(minutes=10)
    hot = gpu(node, number % 8)
    on_job = job(JOBS[number // 6 % len(JOBS)])
    match number % 6:
        case 0 | 3:
            alert = _alert(number, "GPUTemperatureHigh", hot, at, resolved=True)
            steps = (cap(at, UndoStatus.DONE), _wait(at, StepStatus.SUCCEEDED, ended_at=later))
            run = _run(number, at, alert, "gpu-temperature-high", hot, status=Status.SUCCEEDED, ended_at=later,
                       acted_at=at, steps=steps, message="resolved after 9 min 12 s")  # fmt: skip
            return Case(run, alert, _effect(run))
        case 1:
            alert = _alert(number, "TrainingLossSpike", on_job, at, resolved=True)
            step = StepState("steps", 0, "go_back", "action", "job.rollback", StepStatus.SUCCEEDED, {}, (_attempt(at),),
                             {"from_step": 41250, "to_step": 41000}, started_at=at, ended_at=at)  # fmt: skip
            slower = _slower(at)
            run = _run(number, at, alert, "training-loss-spike", on_job, status=Status.SUCCEEDED, ended_at=later,
                       acted_at=at, steps=(step, slower), message="41250 → step 41000")  # fmt: skip
        case 2:
            alert = _alert(number, "GPUTemperatureHigh", hot, at, resolved=number < RUNS - 40)
            refused = cap(at, UndoStatus.DROPPED, status=StepStatus.FAILED, error=_LONG, output={})
            refused = replace(refused, attempts=(_attempt(at, status="rejected", error=_LONG),))
            run = _run(number, at, alert, "gpu-temperature-high", hot, status=Status.FAILED, ended_at=later,
                       steps=(refused,), message=_LONG)  # fmt: skip
        case 4:
            decision = (Decision.TARGET_BUSY, Decision.COOLDOWN, Decision.RATE_LIMITED)[number // 6 % 3]
            alert = _alert(number, "GPUMemoryUsageHigh", hot, at, resolved=False)
            run = _run(number, at, alert, "gpu-memory-usage-high", hot, status=Status.NOT_STARTED, ended_at=at,
                       decision=decision, message=f"another run holds {hot.key} until 12:20:00Z")  # fmt: skip
        case _:
            where = Target(TargetKind.NODE, node=node)
            alert = _alert(number, "NodeDown", where, at, resolved=True)
            drain = StepState("steps", 0, "drain", "action", "kubernetes.drain", StepStatus.OBSERVED,
                              {"node": node, "grace": "5m"})  # fmt: skip
            run = _run(number, at, alert, "node-down", where, status=Status.OBSERVED, ended_at=at,
                       decision=Decision.OBSERVE_ONLY, mode=Mode.OBSERVE, steps=(drain,))  # fmt: skip
    return Case(run, alert)


def _slower(at: datetime) -> StepState:
    attempt = _attempt(at)
    return StepState(
        "steps",
        1,
        "slow_down",
        "action",
        "job.scale_lr",
        StepStatus.SUCCEEDED,
        {"factor": 0.5},
        (attempt,),
        {"before": 3e-4, "after": 1.5e-4, "by_rank": {str(rank): "applied" for rank in range(32)}},
        started_at=at,
        ended_at=at,
        undo=Undo(UndoTrigger.NEVER, "job.scale_lr", {"factor": 2.0}, attempt.command_id, UndoStatus.AVAILABLE),
    )


def _effect(run: Run) -> Effect:
    act = run.created_at.timestamp()
    series = tuple((act + 30.0 * point, 91.0 if point < 2 else 78.0 + point % 3) for point in range(-20, 21))
    return Effect(
        run.id,
        run.playbook,
        run.created_at,
        None,
        EffectVerdict.HELPED,
        "the alert's condition held at the act and did not 10 minutes after",
        'max by (node, uuid) (gpu_temperature_celsius{job="trainmedic-agent"})',
        better="lower",
        operator=">",
        limit=85.0,
        before=91.0,
        at=91.0,
        after=79.0,
        series=series,
    )


def _asking(minutes: int, target: Target, question: str, ahead: tuple[StepAhead, ...], **terms: Any) -> Case:
    at = START - timedelta(minutes=minutes)
    alert = _alert(900 + minutes, "GPUTemperatureHigh" if target.gpu else "TrainingLossSpike", target, at, False)
    asked = Terms(steps=ahead, on_timeout="reject", **terms).as_data()
    step = StepState("steps", 0, "sure", "approve", None, StepStatus.WAITING, asked, message=question, started_at=at,
                     deadline=START + timedelta(minutes=28))  # fmt: skip
    book = "gpu-temperature-high" if target.gpu else "training-loss-spike"
    run = _run(900, at, alert, book, target, status=Status.AWAITING_APPROVAL, waiting_on="approval", steps=(step,))
    return Case(run, alert)


def _open() -> Iterator[Case]:
    """Runs that ask, act and wait."""
    hot, crowded = gpu("node-2", 3), gpu(NODES[3], 5)
    note = "if the alert still fires after 3 min"
    caps = tuple(
        StepAhead(each, "gpu.power_limit", {"percent": percent}, (hot.key,), ("node-2",), 1, told)
        for each, percent, told in (("cap", 80, None), ("cap_harder", 60, note))
    )
    yield _asking(2, hot, "Cool GPU 3 of node-2 by a lower power limit?", caps)
    drain = StepAhead("drain", "kubernetes.drain", {"node": NODES[3], "grace": "5m"}, (crowded.key,), (NODES[3],), 8)
    yield _asking(
        9,
        crowded,
        "Drain gpu-h100-sxm5-rack-07-chassis-03-slot-11.hpc.example.internal? mlx5_3 flaps – 3 jobs run there.",
        (drain,),
        by=("group:hardware-on-call-europe", "user:ann@example.com"),
        count=2,
    )
    slower = StepAhead("slow_down", "job.scale_lr", {"factor": 0.5}, (f"job:{LONG_JOB}",), NODES[:4], 32)
    yield _asking(14, job(LONG_JOB), "Halve the learning rate?", (slower,))
    for minutes, target in ((4, gpu("node-1", 3)), (6, gpu(NODES[2], 1)), (11, gpu(NODES[4], 6))):
        at = START - timedelta(minutes=minutes)
        alert = _alert(800 + minutes, "GPUTemperatureHigh", target, at, False)
        steps = (cap(at), _wait(at, StepStatus.WAITING))
        yield Case(
            _run(
                800,
                at,
                alert,
                "gpu-temperature-high",
                target,
                status=Status.WAITING,
                waiting_on="resolved",
                acted_at=at,
                steps=steps,
                message="waits until the alert resolves",
            ),
            alert,
        )


def cases() -> list[Case]:
    """Oldest first; all but the open ones within the last day."""
    past = [_past(number, START - timedelta(minutes=20 + 6 * (RUNS - number))) for number in range(RUNS)]
    return sorted([*past, *_open()], key=lambda case: case.run.created_at)


def _reactions(case: Case) -> tuple[Reaction, ...]:
    run = case.run
    return (Reaction(run.playbook, str(run.decision), run.message if run.status is Status.NOT_STARTED else "", run.id),)


async def arrange(world: World) -> None:
    """Put the cluster into a world whose history is its store."""
    world.bus.present = [agent(name) for name in NODES]
    world.bus.present_jobs = [job_presence(name, 41_200 + place) for place, name in enumerate(JOBS)]
    world.catalog.books = list(map(_book, _BOOKS))
    arranged = cases()

    def work(tx: Any) -> None:
        tx.add_runs([case.run for case in arranged])
        tx.save_alerts([replace(case.alert, reactions=_reactions(case)) for case in arranged])
        unheeded = _alert(9999, "KubePodCrashLooping", None, START - timedelta(minutes=3), False)
        none = Reaction("gpu-temperature-high", "not_matched", "'severity' is 'info' and must not match info|debug")
        tx.save_alerts([unheeded, replace(_alert(9998, "GPUTemperatureHigh", None, START, False), reactions=(none,))])
        tx.link([(case.run.id, case.run.alert) for case in arranged])
        tx.append([event for case in arranged for event in _events(case.run)])
        tx.agents.save([AgentLife(NODES[3], START - timedelta(hours=2), START - timedelta(hours=2))])
        tx.save_job_lives([JobLife("llm-7", LifeState.GONE, START - timedelta(hours=1), reason=_LONG)])

    await world.findings.transact(work)
    effects = [case.effect for case in arranged if case.effect is not None]
    await world.findings.transact(lambda tx: tx.effects.save(effects))  # which refer to the runs


def _events(run: Run) -> Iterator[Event]:
    yield Event("run_started", run.created_at, run.id, data={"labels": dict(run.alert_labels)})
    for step in run.steps:
        yield Event("step_started", step.started_at or run.created_at, run.id, data={"step": step.id})
    if run.ended_at is not None:
        yield Event("run_ended", run.ended_at, run.id, data={"status": str(run.status), "message": run.message})
        if run.status is Status.FAILED:
            yield Event("run_seen", run.ended_at, run.id, "ann", {"note": "looked at it, 冷却 is slow"})


def _book(name: str) -> MemoryBook:
    text = (_PLAYBOOKS / f"{name}.yaml").read_text(encoding="utf-8")
    documents, _ = yaml_text.read(text, name)
    return MemoryBook(Playbook.model_validate(documents[0].value), "4fb6f4a3c1d2", text, f"playbooks/{name}.yaml")
