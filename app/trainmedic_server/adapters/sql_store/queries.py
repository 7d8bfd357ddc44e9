"""Questions that units of work and the history both ask, on a connection that they hand in."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from trainmedic_server.adapters.sql_store import mapping, schema
from trainmedic_server.adapters.sql_store.lookup import KEYS, Lookup, Row
from trainmedic_server.domain.alert import AlertRecord, Identity
from trainmedic_server.domain.run import OperatorOrder, Run, StepState

_RUNS = Lookup(sa.select(schema.runs).where(schema.runs.c.id.in_(KEYS)))
_STEPS = Lookup(sa.select(schema.steps).where(schema.steps.c.run_id.in_(KEYS)))
_ORDERS = Lookup(
    sa.select(*schema.orders.columns).where(schema.orders.c.run_id.in_(KEYS)).order_by(schema.orders.c.seq)
)
_ALERTS = Lookup(
    sa.select(schema.run_alerts.c.run_id, schema.alerts)
    .join(
        schema.alerts,
        sa.and_(
            schema.alerts.c.fingerprint == schema.run_alerts.c.fingerprint,
            schema.alerts.c.starts_at == schema.run_alerts.c.starts_at,
        ),
    )
    .where(schema.run_alerts.c.run_id.in_(KEYS))
    .order_by(schema.run_alerts.c.seq)
)


def within(starts_at: sa.ColumnElement[datetime]) -> sa.ColumnElement[bool]:
    """The condition that goes with `of_alerts`."""
    return starts_at.between(sa.bindparam("first", type_=schema.Moment), sa.bindparam("last", type_=schema.Moment))


def of_alerts(
    connection: sa.Connection, lookup: Lookup, identities: Collection[Identity]
) -> Iterator[tuple[Identity, Row]]:
    """The rows that `lookup` finds for these alerts, each with its alert's identity.

    Its first two columns are an alert's fingerprint and beginning, and it has the condition
    `within`: it asks for the fingerprints and the time between the first and last beginning, which
    an index answers. SQLite reads a whole table for a list of pairs.
    """
    if not identities:
        return
    wanted = set(identities)
    beginnings = [identity.starts_at for identity in wanted]
    bounds = {"first": min(beginnings), "last": max(beginnings)}
    for row in lookup.rows(connection, [identity.fingerprint for identity in wanted], **bounds):
        identity = Identity(row[0], row[1])
        if identity in wanted:
            yield identity, row


def with_steps(connection: sa.Connection, found: Sequence[Sequence[Any]]) -> list[Run]:
    """The runs of these rows, in their order."""
    steps: dict[str, list[StepState]] = {row[0]: [] for row in found}
    for row in _STEPS.rows(connection, steps):
        steps[row[0]].append(mapping.step_of(row))
    return [mapping.run_of(row, steps[row[0]]) for row in found]


def runs(connection: sa.Connection, run_ids: Collection[str]) -> list[Run]:
    """The runs of these ids, oldest first."""
    found = with_steps(connection, _RUNS.rows(connection, run_ids))
    return sorted(found, key=lambda run: (run.created_at, run.id))


def alerts_of(connection: sa.Connection, run_ids: Collection[str]) -> dict[str, list[AlertRecord]]:
    """The alerts tied to each run that has any, in the order of tying."""
    found: dict[str, list[AlertRecord]] = {}
    for row in _ALERTS.rows(connection, run_ids):
        found.setdefault(row[0], []).append(mapping.alert_of(row[1:]))
    return found


def orders_of(connection: sa.Connection, run_ids: Collection[str]) -> dict[str, list[OperatorOrder]]:
    """The orders given to each run that has any, in the order of giving."""
    found: dict[str, list[OperatorOrder]] = {}
    for row in _ORDERS.rows(connection, run_ids):
        order = mapping.order_of(row)
        found.setdefault(order.run_id, []).append(order)
    return found
