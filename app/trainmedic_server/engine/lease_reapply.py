"""Conditions for reapplying an effect whose lease expired, from its run's history.

``cooldown`` counts from the last application, ``max_runs`` limits repeats of a command.
"""

# After a downtime over the maximum age of alerts, `workers` has cancelled the open runs: their effects stay ended.

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TypeVar

from trainmedic_core import duration
from trainmedic_server.domain import destinations
from trainmedic_server.domain.alert import decisive
from trainmedic_server.domain.event_codec import content_of, name_of
from trainmedic_server.domain.event_kinds import EventKind, SetAgainDone, SetAgainStarted
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.playbook import Guards
from trainmedic_server.domain.run import Attempt, Event, OrderKind, Run, Status, StepState
from trainmedic_server.domain.time_gaps import Ago
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import pausing
from trainmedic_server.ports.store import Transaction

K = TypeVar("K", bound=EventKind)

_ENDED_BY_PERSON = (OrderKind.CANCEL, OrderKind.UNDO, OrderKind.CLOSE_UNDO)


def obstacle(
    tx: Transaction, run: Run, fires: bool | None, mode: Mode, topology: Topology, now: datetime, *, is_same_act: bool
) -> str | None:
    """Return why a lost effect must not be reapplied, or None.

    `fires`: an alert fires, None if unknown. `is_same_act`: reapplying has begun before.
    """
    controls = tx.controls()
    orders = tx.orders_of([run.id]).get(run.id, ())
    order = next((order for order in orders if order.kind in _ENDED_BY_PERSON), None)
    if order is not None:
        return f"{order.actor} has ended the run or ordered its undo"
    if run.status in (Status.CANCELLED, Status.REJECTED):
        return f"the run was {run.status}"
    if not run.mode == mode == Mode.ENFORCE:
        return "the mode is not enforce"
    if not is_same_act and any(step.kind == "approve" for step in run.steps):
        return "a person approved it only once"  # the approval does not cover a repetition
    nodes = tx.touched_nodes(run.id) if controls.pauses else ()
    pause = pausing.holding(controls, run.playbook, run.targets, run.every_label, now, topology, nodes)
    if pause is not None:
        return f"the server is {pause.why(now)}"
    if controls.breaker_open:
        return controls.breaker_reason or "the breaker is open"
    if fires is None:
        return "it is not known yet whether its alert fires"
    # `fires` is from before the wait for the targets, so read the store again.
    is_over = all(alert.is_resolved for alert in decisive(tx.alerts_of([run.id]).get(run.id, [])))
    return "none of its alerts fires" if is_over or not fires else None


def guard_obstacle(tx: Transaction, run: Run, command_id: str, guards: Guards, ago: Ago) -> str | None:
    """Return why the playbook's guards forbid reapplying now, or None."""
    started = [
        event.at for event, content in contents_of(tx, run.id, SetAgainStarted) if content.command_id == command_id
    ]
    made = [
        attempt.ended_at or attempt.started_at
        for step in run.steps
        for attempt in step.attempts
        if command_id in command_ids_of(run, step, attempt)
    ]
    if guards.cooldown and max([*started, *made]) > ago(guards.cooldown):
        return f"cooldown: last applied less than {duration.write(guards.cooldown)} ago"
    if guards.max_runs:
        lately = [at for at in started if at > ago(guards.max_runs.per)]
        if len(lately) >= guards.max_runs.count:
            return f"rate_limited: {len(lately)} times in the last {duration.write(guards.max_runs.per)}"
    return None


def command_ids_of(run: Run, step: StepState, attempt: Attempt) -> Iterator[str]:
    """Yield the command ID for each of the step's targets."""
    return (destinations.command_id_of(attempt.command_id, step, target) for target in run.targets_of(step))


def last_event(tx: Transaction, run_id: str, kind: type[SetAgainStarted] | type[SetAgainDone], command_id: str) -> int:
    """Return the `Event.seq` of the command's last event of this kind, or 0."""
    about = (event.seq or 0 for event, content in contents_of(tx, run_id, kind) if content.command_id == command_id)
    return max(about, default=0)


def contents_of(tx: Transaction, run_id: str, kind: type[K], after: int = 0) -> list[tuple[Event, K]]:
    return [
        (event, content)
        for event in tx.events_of(run_id, name_of(kind))
        if (event.seq or 0) > after and isinstance(content := content_of(event), kind)
    ]
