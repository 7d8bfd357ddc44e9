"""Values of the domain as rows, and rows as values of the domain.

A row is a tuple in the order of its table's columns; the schema's types see to times and JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.adapters.sql_store import schema
from app.domain.alert import Alert, AlertRecord, AlertStatus, Identity
from app.domain.playbook import Mode, UndoTrigger
from app.domain.run import (
    Attempt,
    Controls,
    Decision,
    Event,
    Order,
    OrderKind,
    Run,
    Status,
    StepState,
    StepStatus,
    Undo,
    UndoStatus,
)
from app.domain.target import Kind, Target

Row = Any
"""A row as SQLAlchemy gives it: its columns are attributes."""

_PHASES = ("approval", "steps", "on_failure")
_NO_UNDO = (None,) * 11


def target_key(run: Run) -> str:
    """The key of a run's target; empty where it has none."""
    return run.target.key if run.target else ""


def alert_row(record: AlertRecord) -> tuple[Any, ...]:
    alert = record.alert
    return (
        alert.fingerprint,
        alert.starts_at,
        alert.status.value,
        dict(alert.labels),
        dict(alert.annotations),
        alert.ends_at,
        alert.generator_url,
        record.first_heard_at,
        record.last_heard_at,
        record.count,
        record.resolved_at,
        record.resolved_because,
    )


def alert_of(row: Row) -> AlertRecord:
    alert = Alert(
        fingerprint=row.fingerprint,
        status=AlertStatus(row.status),
        labels=row.labels,
        annotations=row.annotations,
        starts_at=row.starts_at,
        ends_at=row.ends_at,
        generator_url=row.generator_url,
    )
    return AlertRecord(
        alert=alert,
        first_heard_at=row.first_heard_at,
        last_heard_at=row.last_heard_at,
        count=row.times_heard,
        resolved_at=row.resolved_at,
        resolved_because=row.resolved_because,
    )


def run_row(run: Run) -> tuple[Any, ...]:
    target = run.target
    return (
        run.id,
        run.playbook,
        run.version,
        target.kind.value if target else None,
        target.node if target else None,
        target.gpu if target else None,
        target.job if target else None,
        target_key(run),
        run.mode.value,
        run.status.value,
        run.decision.value,
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
    )


def run_of(row: Row, steps: Sequence[StepState]) -> Run:
    kind = row.target_kind
    return Run(
        id=row.id,
        playbook=row.playbook,
        version=row.version,
        target=Target(Kind(kind), node=row.node, gpu=row.gpu, job=row.job) if kind else None,
        mode=Mode(row.mode),
        status=Status(row.status),
        decision=Decision(row.decision),
        alert=Identity(row.alert_fingerprint, row.alert_starts_at),
        alert_name=row.alert_name,
        alert_labels=row.alert_labels,
        created_at=row.created_at,
        steps=tuple(sorted(steps, key=_place)),
        ended_at=row.ended_at,
        acted_at=row.acted_at,
        waiting_on=row.waiting_on,
        message=row.message,
    )


def _place(step: StepState) -> tuple[int, int]:
    """In the order in which they run."""
    return (_PHASES.index(step.phase), step.index)


def step_row(run_id: str, step: StepState) -> tuple[Any, ...]:
    return (
        run_id,
        step.phase,
        step.index,
        step.id,
        step.kind,
        step.action,
        step.status.value,
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
    )


def step_of(row: Row) -> StepState:
    return StepState(
        phase=row.phase,
        index=row.position,
        id=row.id,
        kind=row.kind,
        action=row.action,
        status=StepStatus(row.status),
        params=row.params,
        attempts=_attempts_of(row.attempts),
        output=row.output,
        error=row.error,
        message=row.message,
        started_at=row.started_at,
        ended_at=row.ended_at,
        deadline=row.deadline,
        retry_at=row.retry_at,
        undo=_undo_of(row) if row.undo_status else None,
    )


def _undo_columns(undo: Undo) -> tuple[Any, ...]:
    return (
        undo.trigger.value,
        undo.action,
        dict(undo.params),
        undo.undo_of,
        undo.status.value,
        undo.because,
        _attempts_document(undo.attempts),
        dict(undo.output),
        undo.error,
        undo.retry_at,
        undo.attempts[-1].command_id if undo.attempts else None,
    )


def _undo_of(row: Row) -> Undo:
    return Undo(
        trigger=UndoTrigger(row.undo_trigger),
        action=row.undo_action,
        params=row.undo_params,
        undo_of=row.undo_of,
        status=UndoStatus(row.undo_status),
        because=row.undo_because,
        attempts=_attempts_of(row.undo_attempts),
        output=row.undo_output,
        error=row.undo_error,
        retry_at=row.undo_retry_at,
    )


def _attempts_document(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    return [
        {
            "number": attempt.number,
            "command_id": attempt.command_id,
            "started_at": schema.micros(attempt.started_at),
            "deadline": schema.micros(attempt.deadline),
            "status": attempt.status,
            "ended_at": None if attempt.ended_at is None else schema.micros(attempt.ended_at),
            "error": attempt.error,
        }
        for attempt in attempts
    ]


def _attempts_of(document: Sequence[Mapping[str, Any]]) -> tuple[Attempt, ...]:
    return tuple(
        Attempt(
            number=one["number"],
            command_id=one["command_id"],
            started_at=schema.moment(one["started_at"]),
            deadline=schema.moment(one["deadline"]),
            status=one["status"],
            ended_at=None if one["ended_at"] is None else schema.moment(one["ended_at"]),
            error=one["error"],
        )
        for one in document
    )


def order_row(order: Order) -> tuple[Any, ...]:
    """Without ``seq``, which the database gives."""
    return (order.id, order.run_id, order.kind.value, order.actor, order.at, order.note, order.step)


def order_of(row: Row) -> Order:
    return Order(
        id=row.id,
        run_id=row.run_id,
        kind=OrderKind(row.kind),
        actor=row.actor,
        at=row.at,
        note=row.note,
        step=row.step,
    )


def event_row(event: Event) -> tuple[Any, ...]:
    """Without ``seq``, which the database gives."""
    return (event.run_id, event.kind, event.at, event.actor, dict(event.data))


def event_of(row: Row) -> Event:
    return Event(kind=row.kind, at=row.at, run_id=row.run_id, actor=row.actor, data=row.data, seq=row.seq)


def controls_row(controls: Controls) -> tuple[Any, ...]:
    return (
        1,
        controls.paused,
        controls.paused_by,
        controls.paused_at,
        controls.breaker_open,
        controls.breaker_opened_at,
        controls.breaker_reason,
        controls.alive_at,
    )


def controls_of(row: Row) -> Controls:
    return Controls(
        paused=row.paused,
        paused_by=row.paused_by,
        paused_at=row.paused_at,
        breaker_open=row.breaker_open,
        breaker_opened_at=row.breaker_opened_at,
        breaker_reason=row.breaker_reason,
        alive_at=row.alive_at,
    )
