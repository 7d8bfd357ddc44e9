"""Runs with their steps, alerts and operator commands."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from msgspec.structs import replace

from trainmedic_server.adapters.sql_store import mapping, schema
from trainmedic_server.adapters.sql_store.lookup import KEYS, Lookup, Row
from trainmedic_server.domain.alert import AlertRecord, Identity
from trainmedic_server.domain.changes import LOSS_KINDS
from trainmedic_server.domain.event_codec import names
from trainmedic_server.domain.group import Member, counted_together
from trainmedic_server.domain.run import Decision, Event, OperatorOrder, Run, Status, StepState

_RUNS = Lookup(sa.select(schema.runs).where(schema.runs.c.id.in_(KEYS)))
_STEPS = Lookup(sa.select(schema.steps).where(schema.steps.c.run_id.in_(KEYS)))
_ORDERS = Lookup(
    sa.select(*schema.orders.columns).where(schema.orders.c.run_id.in_(KEYS)).order_by(schema.orders.c.seq)
)
_LOSSES = Lookup(
    sa.select(*schema.events.columns)
    .where(
        schema.events.c.run_id.in_(KEYS),
        sa.or_(*(schema.events.c.kind == sa.literal_column(f"'{kind}'") for kind in sorted(names(*LOSS_KINDS)))),
    )
    .order_by(schema.events.c.seq)
)
_TOUCHED_NODES = Lookup(sa.select(schema.touched_nodes).where(schema.touched_nodes.c.run_id.in_(KEYS)))
_GROUPS = Lookup(sa.select(schema.groups).where(schema.groups.c.run_id.in_(KEYS)))
_MEMBER_STATE = (schema.runs.c.parent, schema.runs.c.status, schema.runs.c.decision, schema.runs.c.unfinished)
_MEMBER_STATES = Lookup(
    sa.select(*_MEMBER_STATE, sa.func.max(schema.runs.c.batch), sa.func.count())
    .where(schema.runs.c.parent.in_(KEYS))
    .group_by(*_MEMBER_STATE)
)
SAME_ALERT = sa.and_(
    schema.run_alerts.c.fingerprint == schema.alerts.c.fingerprint,
    schema.run_alerts.c.starts_at == schema.alerts.c.starts_at,
)
_ALERTS = Lookup(
    sa.select(schema.run_alerts.c.run_id, schema.alerts)
    .join(schema.alerts, SAME_ALERT)
    .where(schema.run_alerts.c.run_id.in_(KEYS))
    .order_by(schema.run_alerts.c.seq)
)


def within(starts_at: sa.ColumnElement[datetime]) -> sa.ColumnElement[bool]:
    # Excludes most other alerts of a fingerprint. `of_alerts` checks the rest.
    return starts_at.between(
        sa.bindparam("first", type_=schema.TimeColumn), sa.bindparam("last", type_=schema.TimeColumn)
    )


def of_alerts(
    connection: sa.Connection, lookup: Lookup, identities: Collection[Identity]
) -> Iterator[tuple[Identity, Row]]:
    """Yield each row with its alert's identity. `lookup` returns fingerprint and start first, with the condition
    `within`.
    """
    if not identities:
        return
    distinct = set(identities)
    beginnings = [identity.starts_at for identity in distinct]
    bounds = {"first": min(beginnings), "last": max(beginnings)}
    for row in lookup.rows(connection, [identity.fingerprint for identity in distinct], **bounds):
        identity = Identity(row[0], row[1])
        if identity in distinct:
            yield identity, row


def with_steps(connection: sa.Connection, rows: Sequence[Sequence[Any]]) -> list[Run]:
    steps: dict[str, list[StepState]] = {row[0]: [] for row in rows}
    for row in _STEPS.rows(connection, steps):
        steps[row[0]].append(mapping.step_of(row))
    return [mapping.run_of(row, steps[row[0]]) for row in rows]


def runs(connection: sa.Connection, run_ids: Collection[str]) -> list[Run]:
    runs_of_rows = with_steps(connection, _RUNS.rows(connection, run_ids))
    return sorted(runs_of_rows, key=lambda run: (run.created_at, run.id))


def alerts_of(connection: sa.Connection, run_ids: Collection[str]) -> dict[str, list[AlertRecord]]:
    alerts: dict[str, list[AlertRecord]] = {}
    for row in _ALERTS.rows(connection, run_ids):
        alerts.setdefault(row[0], []).append(mapping.alert_of(row[1:]))
    return alerts


def losses_of(connection: sa.Connection, run_ids: Collection[str]) -> dict[str, list[Event]]:
    losses: dict[str, list[Event]] = {}
    for row in _LOSSES.rows(connection, run_ids):
        event = mapping.event_of(row)
        losses.setdefault(event.run_id or "", []).append(event)
    return losses


def with_touched_nodes(connection: sa.Connection, runs_read: Sequence[Run]) -> list[Run]:
    nodes: dict[str, set[str]] = {run.id: set() for run in runs_read}
    for run in runs_read:
        if run.acted_at is not None and run.target is not None and run.target.node is not None:
            nodes[run.id].add(run.target.node)
    for run_id, node, _ in _TOUCHED_NODES.rows(connection, nodes):
        nodes[run_id].add(node)
    return [replace(run, touched=tuple(sorted(nodes[run.id]))) for run in runs_read]


def with_groups(connection: sa.Connection, runs_read: Sequence[Run]) -> list[Run]:
    parents = [run.id for run in runs_read if run.is_group]
    if not parents:
        return list(runs_read)
    totals = {row[0]: len(row[1]) for row in _GROUPS.rows(connection, parents)}
    members: dict[str, list[tuple[Member, int]]] = {}
    # Members with the same state are counted as one, `count` times.
    for parent, *state, count in _MEMBER_STATES.rows(connection, parents):
        status, decision, unfinished, batch = state
        alike = Member("", "", batch or 0, Status(status), Decision(decision), bool(unfinished))
        members.setdefault(parent, []).append((alike, count))
    counts = {run_id: counted_together(total, members.get(run_id, ())) for run_id, total in totals.items()}
    return [replace(run, group=counts[run.id]) if run.id in counts else run for run in runs_read]


def orders_of(connection: sa.Connection, run_ids: Collection[str]) -> dict[str, list[OperatorOrder]]:
    orders: dict[str, list[OperatorOrder]] = {}
    for row in _ORDERS.rows(connection, run_ids):
        order = mapping.order_of(row)
        orders.setdefault(order.run_id, []).append(order)
    return orders
