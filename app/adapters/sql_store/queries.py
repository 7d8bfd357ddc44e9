"""Questions that units of work and the history both ask, on a connection that they hand in.

Lists of keys are asked in chunks, under any database's limit of parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import sqlalchemy as sa

from app.adapters.sql_store import mapping, schema
from app.domain.alert import AlertRecord
from app.domain.run import Order, Run, StepState

K = TypeVar("K")

_CHUNK = 500

_RUNS = sa.select(schema.runs).where(schema.runs.c.id.in_(sa.bindparam("keys", expanding=True)))
_STEPS = sa.select(schema.steps).where(schema.steps.c.run_id.in_(sa.bindparam("keys", expanding=True)))
_ORDERS = (
    sa.select(schema.orders)
    .where(schema.orders.c.run_id.in_(sa.bindparam("keys", expanding=True)))
    .order_by(schema.orders.c.seq)
)
_ALERTS = (
    sa.select(schema.run_alerts.c.run_id, schema.alerts)
    .join(
        schema.alerts,
        sa.and_(
            schema.alerts.c.fingerprint == schema.run_alerts.c.fingerprint,
            schema.alerts.c.starts_at == schema.run_alerts.c.starts_at,
        ),
    )
    .where(schema.run_alerts.c.run_id.in_(sa.bindparam("keys", expanding=True)))
    .order_by(schema.run_alerts.c.seq)
)


def chunks(keys: Collection[K]) -> Iterator[list[K]]:
    """The keys, each once, in lists that one statement can take."""
    left = iter(dict.fromkeys(keys))
    while chunk := list(islice(left, _CHUNK)):
        yield chunk


def rows(connection: sa.Connection, statement: sa.Select[Any], keys: Collection[Any]) -> Iterator[Any]:
    """The rows that `statement` finds for ``keys``."""
    for chunk in chunks(keys):
        yield from connection.execute(statement, {"keys": chunk}).all()


def with_steps(connection: sa.Connection, found: Sequence[Any]) -> list[Run]:
    """The runs of these rows, in their order."""
    steps: dict[str, list[StepState]] = {row.id: [] for row in found}
    for row in rows(connection, _STEPS, steps):
        steps[row.run_id].append(mapping.step_of(row))
    return [mapping.run_of(row, steps[row.id]) for row in found]


def runs(connection: sa.Connection, run_ids: Collection[str]) -> list[Run]:
    """The runs of these ids, oldest first."""
    found = with_steps(connection, list(rows(connection, _RUNS, run_ids)))
    return sorted(found, key=lambda run: (run.created_at, run.id))


def alerts_of(connection: sa.Connection, run_ids: Collection[str]) -> dict[str, list[AlertRecord]]:
    """The alerts tied to each run that has any, in the order of tying."""
    found: dict[str, list[AlertRecord]] = {}
    for row in rows(connection, _ALERTS, run_ids):
        found.setdefault(row.run_id, []).append(mapping.alert_of(row))
    return found


def orders_of(connection: sa.Connection, run_ids: Collection[str]) -> dict[str, list[Order]]:
    """The orders given to each run that has any, in the order of giving."""
    found: dict[str, list[Order]] = {}
    for row in rows(connection, _ORDERS, run_ids):
        found.setdefault(row.run_id, []).append(mapping.order_of(row))
    return found
