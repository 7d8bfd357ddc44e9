"""Values to fill a run store with, and Hypothesis strategies for any that it can be given."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from trainmedic.wire.envelope import new_id
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.domain.alert import Alert, AlertRecord, AlertStatus, Identity
from trainmedic_server.domain.playbook import Mode, UndoTrigger
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

START = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def at(minutes: float) -> datetime:
    """So many minutes after the beginning of these tests' time."""
    return START + timedelta(minutes=minutes)


def alert(fingerprint: str = "f1", minute: float = 0, **changes: Any) -> Alert:
    fields: dict[str, Any] = {
        "fingerprint": fingerprint,
        "status": AlertStatus.FIRING,
        "labels": {"alertname": "GPUTemperatureHigh", "node": "node-1", "gpu": "0"},
        "annotations": {"summary": "hot"},
        "starts_at": at(minute),
        "generator_url": "http://prometheus/graph",
    }
    return Alert(**(fields | changes))


def heard(fingerprint: str = "f1", minute: float = 0, **changes: Any) -> AlertRecord:
    """An alert that began at `minute` and was heard of then for the first time."""
    return replace(AlertRecord(alert(fingerprint, minute), at(minute), at(minute)), **changes)


def gpu(number: int = 0, node: str = "node-1") -> Target:
    return Target(TargetKind.GPU, node=node, gpu=str(number))


def step(index: int = 0, phase: str = "steps", **changes: Any) -> StepState:
    return replace(StepState(phase, index, f"{phase}-{index}", "action", action="gpu.power_limit"), **changes)


def attempt(command_id: str, number: int = 1, **changes: Any) -> Attempt:
    return replace(Attempt(number, command_id, at(1), at(2)), **changes)


def undo(status: UndoStatus = UndoStatus.ARMED, **changes: Any) -> Undo:
    return replace(Undo(UndoTrigger.ON_RESOLVE, "gpu.power_limit", {"watts": 700}, "c0", status), **changes)


def run(minute: float = 0, target: Target | None = None, **changes: Any) -> Run:
    """A running run of playbook ``cool`` that was created at `minute`, with one step."""
    created_at = changes.pop("created_at", at(minute))
    fields: dict[str, Any] = {
        "id": new_id(int(created_at.timestamp() * 1000)),
        "playbook": "cool",
        "version": "v1",
        "target": target or gpu(),
        "mode": Mode.ENFORCE,
        "status": Status.RUNNING,
        "decision": Decision.STARTED,
        "alert": Identity("f1", at(0)),
        "alert_name": "GPUTemperatureHigh",
        "alert_labels": {"alertname": "GPUTemperatureHigh"},
        "created_at": created_at,
        "steps": (step(),),
    }
    return Run(**(fields | changes))


def closed(minute: float = 0, target: Target | None = None, **changes: Any) -> Run:
    """A run that succeeded a minute after it was created."""
    return run(minute, target, **{"status": Status.SUCCEEDED, "ended_at": at(minute + 1), **changes})


def not_started(minute: float = 0, decision: Decision = Decision.COOLDOWN, **changes: Any) -> Run:
    return run(minute, **{"status": Status.NOT_STARTED, "decision": decision, "ended_at": at(minute), **changes})


def event(kind: str = "started", run_id: str | None = None, minute: float = 0, **data: Any) -> Event:
    return Event(kind, at(minute), run_id, data=data)


# any value, for round trips

_text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
_maybe = st.none() | _text
_times = st.datetimes(datetime(1, 1, 3), datetime(9999, 12, 30), timezones=st.just(UTC))
_maybe_times = st.none() | _times
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=6,
)
_objects = st.dictionaries(_text, _json, max_size=3)
_attempts = st.lists(
    st.builds(
        Attempt,
        number=st.integers(1, 100),
        command_id=_text,
        started_at=_times,
        deadline=_times,
        status=_text,
        ended_at=_maybe_times,
        error=_maybe,
        order=_maybe,
    ),
    max_size=3,
).map(tuple)
_undos = st.none() | st.builds(
    Undo,
    trigger=st.sampled_from(UndoTrigger),
    action=_text,
    params=_objects,
    undo_of=_text,
    status=st.sampled_from(UndoStatus),
    because=_maybe,
    attempts=_attempts,
    output=_objects,
    error=_maybe,
    retry_at=_maybe_times,
)
_steps = st.builds(
    StepState,
    phase=st.just("steps"),
    index=st.just(0),
    id=_text,
    kind=_text,
    action=_maybe,
    status=st.sampled_from(StepStatus),
    params=_objects,
    attempts=_attempts,
    output=_objects,
    error=_maybe,
    message=_maybe,
    started_at=_maybe_times,
    ended_at=_maybe_times,
    deadline=_maybe_times,
    retry_at=_maybe_times,
    undo=_undos,
)


def _in_order(steps: list[StepState], on_failure: list[StepState]) -> tuple[StepState, ...]:
    return tuple(
        replace(one, phase=phase, index=index)
        for phase, ones in (("steps", steps), ("on_failure", on_failure))
        for index, one in enumerate(ones)
    )


_targets = (
    st.none()
    | st.builds(Target, st.just(TargetKind.GPU), node=_text, gpu=_text)
    | st.builds(Target, st.just(TargetKind.NODE), node=_text)
    | st.builds(Target, st.just(TargetKind.JOB), job=_text)
    | st.just(Target(TargetKind.CLUSTER))
)

any_run = st.builds(
    Run,
    id=_text,
    playbook=_text,
    version=_text,
    target=_targets,
    mode=st.sampled_from(Mode),
    status=st.sampled_from(Status),
    decision=st.sampled_from(Decision),
    alert=st.builds(Identity, _text, _times),
    alert_name=_text,
    alert_labels=st.dictionaries(_text, _text, max_size=3),
    created_at=_times,
    steps=st.builds(_in_order, st.lists(_steps, max_size=3), st.lists(_steps, max_size=2)),
    ended_at=_maybe_times,
    acted_at=_maybe_times,
    waiting_on=_maybe,
    message=_text,
)

any_record = st.builds(
    AlertRecord,
    alert=st.builds(
        Alert,
        fingerprint=_text,
        status=st.sampled_from(AlertStatus),
        labels=st.dictionaries(_text, _text, max_size=3),
        annotations=st.dictionaries(_text, _text, max_size=3),
        starts_at=_times,
        ends_at=_maybe_times,
        generator_url=_text,
    ),
    first_heard_at=_times,
    last_heard_at=_times,
    count=st.integers(1, 2**40),
    resolved_at=_maybe_times,
    resolved_because=_maybe,
    reactions=st.lists(
        st.builds(Reaction, playbook=_text, decision=_text, reason=_text, run_id=_maybe), max_size=2
    ).map(tuple),
)

any_event = st.builds(Event, kind=_text, at=_times, run_id=_maybe, actor=_text, data=_objects)


def renewed(run: Run) -> Run:
    """The same with an id and a playbook of its own: Hypothesis tries a value again, a store keeps the first."""
    return replace(run, id=new_id(), playbook=new_id())
