"""Conversion between domain values and rows in column order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from msgspec.structs import asdict, replace

from trainmedic_core.target import Target, TargetKind
from trainmedic_server.adapters.sql_store.history_cursor import microseconds_of, time_of
from trainmedic_server.domain import memory
from trainmedic_server.domain.alert import Alert, AlertRecord, AlertStatus, Identity
from trainmedic_server.domain.group import Member
from trainmedic_server.domain.job_life import JobLife, LifeState
from trainmedic_server.domain.pause import OperatorPause
from trainmedic_server.domain.playbook import APPROVAL, EVERY_PHASE, Mode, UndoTrigger
from trainmedic_server.domain.reaction import Reaction
from trainmedic_server.domain.run import (
    OPEN,
    Attempt,
    Controls,
    Decision,
    Event,
    OperatorOrder,
    OrderKind,
    Run,
    Status,
    StepState,
    StepStatus,
    Undo,
    UndoStatus,
)
from trainmedic_server.domain.time_gaps import TimeGap

Row = Sequence[Any]

_PHASES = (APPROVAL, *EVERY_PHASE)  # in the order of a run's steps
_NO_UNDO = (None,) * 11  # values of the columns ``undo_…``


def alert_row(record: AlertRecord) -> tuple[Any, ...]:
    alert, made = record.alert, record.reactions
    return (
        alert.fingerprint,
        alert.starts_at,
        str(alert.status),
        dict(alert.labels),
        dict(alert.annotations),
        alert.ends_at,
        alert.generator_url,
        record.first_heard_at,
        record.last_heard_at,
        record.count,
        record.resolved_at,
        record.resolved_because,
        alert.name,
        [(each.playbook, each.decision, each.reason, each.run_id) for each in made] if made else [],
        record.has_reaction if made else False,
        alert.original_name,
        None if alert.original is None else dict(alert.original),
    )


def alert_of(row: Row) -> AlertRecord:
    # Skipped columns are derived from others, for queries and indexes.
    fingerprint, starts_at, status, labels, annotations, ends_at, generator_url, first, last, *rest = row
    count, resolved_at, resolved_because, _, reactions, _, _, original = rest
    alert = Alert(fingerprint, AlertStatus(status), labels, annotations, starts_at, ends_at, generator_url, original)
    made = tuple([Reaction(*reaction) for reaction in reactions]) if reactions else ()
    return AlertRecord(alert, first, last, count, resolved_at, resolved_because, made)


def run_row(run: Run) -> tuple[Any, ...]:
    target = run.target
    return (
        run.id,
        run.playbook,
        run.version,
        str(target.kind) if target else None,
        target.node if target else None,
        target.gpu if target else None,
        target.job if target else None,
        run.target_key,
        str(run.mode),
        str(run.status),
        str(run.decision),
        run.alert.fingerprint,
        run.alert.starts_at,
        run.alert_name,
        dict(run.alert_labels),
        run.created_at,
        run.ended_at,
        run.acted_at,
        run.waiting_on,
        run.message,
        run.is_open or run.owes_undo,
        run.started_by,
        run.repeats,
        run.request_key,
        run.original_alert_name,
        None if run.original_labels is None else dict(run.original_labels),
        run.parent,
        run.batch,
        [target.key for target in run.also] if run.also else None,
        None if run.memory is None else run.memory.as_json(),
        run.request_digest,
    )


def run_of(row: Row, steps: Sequence[StepState]) -> Run:
    run_id, playbook, version, kind, node, gpu, job, target_key, mode, status, decision, *rest = row
    fingerprint, starts_at, alert_name, alert_labels, created_at, ended_at, acted_at, *rest = rest
    waiting_on, message, unfinished, started_by, repeats, request_key, _, original_labels, parent, batch, *last = rest
    also, kept, request_digest = last
    return Run(
        id=run_id,
        playbook=playbook,
        version=version,
        target=_target_of(kind, node, gpu, job, target_key),
        mode=Mode(mode),
        status=Status(status),
        decision=Decision(decision),
        alert=Identity(fingerprint, starts_at),
        alert_name=alert_name,
        alert_labels=alert_labels,
        created_at=created_at,
        steps=tuple(steps) if len(steps) < 2 else tuple(sorted(steps, key=_position)),
        ended_at=ended_at,
        acted_at=acted_at,
        waiting_on=waiting_on,
        message=message,
        started_by=started_by,
        repeats=repeats,
        request_key=request_key,
        request_digest=request_digest,
        original_labels=original_labels,
        parent=parent,
        batch=batch,
        also=tuple(map(Target.of_key, also)) if also else (),
        memory=None if kept is None else memory.of_json(kept),
        # For a closed parent, `unfinished` means that a member is (`statements.UPDATE_PARENT`).
        members_owe=kind == TargetKind.GROUP and bool(unfinished) and Status(status) not in OPEN,
    )


def _target_of(kind: str | None, node: str | None, gpu: str | None, job: str | None, key: str) -> Target | None:
    if kind is None:
        return None
    return Target(TargetKind(kind), node, gpu, job, key if kind == TargetKind.GROUP else None)


def member_of(row: Row) -> Member:
    target, run_id, batch, status, decision, unfinished, acted_at, why = row
    has_acted = acted_at is not None
    return Member(target, run_id, batch or 0, Status(status), Decision(decision), bool(unfinished), has_acted, why)


def _position(step: StepState) -> tuple[int, int]:
    return (_PHASES.index(step.phase), step.index)


def step_row(run_id: str, step: StepState) -> tuple[Any, ...]:
    return (
        run_id,
        step.phase,
        step.index,
        step.id,
        step.kind,
        step.action,
        str(step.status),
        dict(step.params),
        _attempts_document(step.attempts),
        dict(step.output),
        step.error,
        step.message,
        step.started_at,
        step.ended_at,
        step.deadline,
        step.retry_at,
        step.attempts[-1].command_id if step.attempts else None,
        *(_undo_columns(step.undo) if step.undo else _NO_UNDO),
        step.target,
    )


def step_of(row: Row) -> StepState:
    _, phase, index, step_id, kind, action, status, params, attempts, output, *rest = row
    error, message, started_at, ended_at, deadline, retry_at, _, *undo, target = rest
    return StepState(
        phase=phase,
        index=index,
        id=step_id,
        kind=kind,
        action=action,
        status=StepStatus(status),
        params=params,
        attempts=_attempts_of(attempts),
        output=output,
        error=error,
        message=message,
        started_at=started_at,
        ended_at=ended_at,
        deadline=deadline,
        retry_at=retry_at,
        undo=_undo_of(undo),
        target=target,
    )


def _undo_columns(undo: Undo) -> tuple[Any, ...]:
    return (
        str(undo.trigger),
        undo.action,
        dict(undo.params),
        undo.undo_of,
        str(undo.status),
        undo.because,
        _attempts_document(undo.attempts),
        dict(undo.output),
        undo.error,
        undo.retry_at,
        undo.attempts[-1].command_id if undo.attempts and undo.status is not UndoStatus.DONE else None,
    )


def _undo_of(columns: Row) -> Undo | None:
    trigger, action, params, undo_of, status, because, attempts, output, error, retry_at, _ = columns
    if status is None:
        return None
    return Undo(
        trigger=UndoTrigger(trigger),
        action=action,
        params=params,
        undo_of=undo_of,
        status=UndoStatus(status),
        because=because,
        attempts=_attempts_of(attempts),
        output=output,
        error=error,
        retry_at=retry_at,
    )


def _attempts_document(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    return [
        {
            "number": attempt.number,
            "command_id": attempt.command_id,
            "started_at": microseconds_of(attempt.started_at),
            "deadline": microseconds_of(attempt.deadline),
            "status": attempt.status,
            "ended_at": None if attempt.ended_at is None else microseconds_of(attempt.ended_at),
            "error": attempt.error,
            **({"order": attempt.order} if attempt.order is not None else {}),
            **({"in_part": True} if attempt.in_part else {}),
        }
        for attempt in attempts
    ]


def _attempts_of(document: Sequence[Mapping[str, Any]]) -> tuple[Attempt, ...]:
    return tuple(
        Attempt(
            number=attempt["number"],
            command_id=attempt["command_id"],
            started_at=time_of(attempt["started_at"]),
            deadline=time_of(attempt["deadline"]),
            status=attempt["status"],
            ended_at=None if attempt["ended_at"] is None else time_of(attempt["ended_at"]),
            error=attempt["error"],
            order=attempt.get("order"),
            in_part=bool(attempt.get("in_part")),
        )
        for attempt in document
    )


def order_row(order: OperatorOrder) -> tuple[Any, ...]:
    return (order.id, order.run_id, str(order.kind), order.actor, order.at, order.note, order.step, order.asked)


def order_of(row: Row) -> OperatorOrder:
    _, order_id, run_id, kind, actor, at, note, step, asked = row
    return OperatorOrder(order_id, run_id, OrderKind(kind), actor, at, note, step, asked)


def event_row(event: Event) -> tuple[Any, ...]:
    return (event.run_id, event.kind, event.at, event.actor, dict(event.data))


def event_of(row: Row) -> Event:
    seq, run_id, kind, at, actor, data = row
    return Event(kind, at, run_id, actor, data, seq)


def time_gap_row(gap: TimeGap) -> tuple[Any, ...]:
    return (gap.ended_at, gap.length // timedelta(microseconds=1), gap.is_downtime)


def time_gap_of(row: Row) -> TimeGap:
    _, ended_at, microseconds, is_downtime = row
    return TimeGap(ended_at, timedelta(microseconds=microseconds), is_downtime)


def job_life_row(life: JobLife) -> dict[str, Any]:
    return {**asdict(life), "state": str(life.state)}


def job_life_of(row: Row) -> JobLife:
    name, state, *others = row
    return JobLife(name, LifeState(state), *others)


def controls_row(controls: Controls) -> tuple[Any, ...]:
    return (
        1,  # ID of the only row
        controls.paused,
        controls.paused_by,
        controls.paused_at,
        controls.breaker_open,
        controls.breaker_opened_at,
        controls.breaker_reason,
        controls.alive_at,
        [pause.as_data() for pause in controls.pauses],
        controls.breaker_closed_at,
    )


def controls_of(row: Row) -> Controls:
    *switches, pauses, closed_at = row[1:]
    controls = Controls(*switches)
    return replace(controls, pauses=tuple(map(OperatorPause.of_data, pauses or ())), breaker_closed_at=closed_at)
