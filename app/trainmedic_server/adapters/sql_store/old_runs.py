"""Deletion of old runs after they were archived.

A file is written before its first run is deleted, the next one after its last. So after a kill, only the newest
file has runs that the store still has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeAlias

import sqlalchemy as sa

from trainmedic_server.adapters.sql_store import prune, queries
from trainmedic_server.adapters.sql_store.columns import encode_json
from trainmedic_server.adapters.sql_store.effects import effects, event_positions
from trainmedic_server.adapters.sql_store.schema import (
    alerts,
    events,
    groups,
    orders,
    run_alerts,
    runs,
    steps,
    touched_nodes,
)
from trainmedic_server.adapters.sql_store.transaction import SqlTransaction
from trainmedic_server.ports.archive import ArchivedRun, RunArchive

RUNS_PER_FILE = 1000
_RUNS_PER_READ = 50

# Tables with the columns by which a run's rows are sorted.
_TABLES_OF_RUNS: Mapping[str, tuple[sa.Table, Sequence[sa.Column[Any]]]] = {
    "steps": (steps, [steps.c.phase, steps.c.position]),
    "touched_nodes": (touched_nodes, [touched_nodes.c.node]),
    "orders": (orders, [orders.c.seq]),
    "events": (events, [events.c.seq]),
    "effects": (effects, [effects.c.acted_at]),
    "groups": (groups, []),
}
_LAST_EVENTS = sa.select(events.c.run_id, sa.func.max(events.c.seq)).group_by(events.c.run_id)

# `Delete` runs work in a write transaction, and returns how many runs that deleted. `Read` runs work that only reads.
Delete: TypeAlias = Callable[[Callable[[SqlTransaction], int]], Awaitable[int]]
Read: TypeAlias = Callable[[Callable[[sa.Connection], Any]], Awaitable[Any]]


async def delete_archived(archive: RunArchive, read: Read, delete: Delete, before: datetime) -> int:
    """Archive and delete runs created before `before`; return their number. The last file's number is stored as an
    event position.

    Raises StoreUnavailable, ArchiveUnavailable.
    """
    saved_number = await read(partial(_saved_number, name=archive.name))
    number, last = await asyncio.to_thread(archive.last, saved_number)
    if number > saved_number:
        await delete(partial(_save_number, name=archive.name, number=number))
    deleted = await _delete(delete, last)  # Those that a kill has left.
    while ids := await read(partial(prune.old_run_ids, before=before, limit=RUNS_PER_FILE)):
        archived: list[ArchivedRun] = []
        for start in range(0, len(ids), _RUNS_PER_READ):
            archived += await read(partial(read_archived_runs, run_ids=ids[start : start + _RUNS_PER_READ]))
        number = await asyncio.to_thread(archive.write, archived, number)
        await delete(partial(_save_number, name=archive.name, number=number))
        deleted += await _delete(delete, archived)
    return deleted


def _saved_number(connection: sa.Connection, name: str) -> int:
    statement = sa.select(event_positions.c.position).where(event_positions.c.listener == _listener(name))
    return int(connection.execute(statement).scalar() or 0)


def _save_number(transaction: SqlTransaction, name: str, number: int) -> int:
    transaction.event_positions.save_position(_listener(name), number)
    return 0  # Nothing was deleted.


def _listener(name: str) -> str:
    return f"archive:{name}"


def read_archived_runs(connection: sa.Connection, run_ids: Collection[str]) -> list[ArchivedRun]:
    chosen = sa.select(runs).where(runs.c.id.in_(run_ids)).order_by(runs.c.created_at, runs.c.id)
    documents: dict[str, dict[str, Any]] = {
        row.id: {"run": dict(row._mapping), "alerts": [], **{name: [] for name in _TABLES_OF_RUNS}}
        for row in connection.execute(chosen)
    }
    linked = (
        sa.select(run_alerts.c.run_id, alerts)
        .join(alerts, queries.SAME_ALERT)
        .where(run_alerts.c.run_id.in_(run_ids))
        .order_by(run_alerts.c.seq)
    )
    for row in connection.execute(linked):
        _add(documents, "alerts", row)
    for name, (table, order) in _TABLES_OF_RUNS.items():
        for row in connection.execute(sa.select(table).where(table.c.run_id.in_(run_ids)).order_by(*order)):
            _add(documents, name, row)
    return [ArchivedRun.of(run_id, document, encode_json(document)) for run_id, document in documents.items()]


def _add(documents: dict[str, dict[str, Any]], name: str, row: sa.Row[Any]) -> None:
    columns = dict(row._mapping)
    documents[columns.pop("run_id")][name].append(columns)


async def _delete(delete: Delete, archived: Sequence[ArchivedRun]) -> int:
    deleted = 0
    for start in range(0, len(archived), prune.BATCH):
        deleted += await delete(partial(_delete_unchanged, archived=archived[start : start + prune.BATCH]))
    return deleted


def _delete_unchanged(transaction: SqlTransaction, archived: Sequence[ArchivedRun]) -> int:
    # A run that changed after its archiving stays, and is archived again.
    connection = transaction.flushed_connection()
    ids = [run.id for run in archived]
    finished = sa.select(runs.c.id).where(runs.c.id.in_(ids), sa.not_(runs.c.unfinished))
    there = {row.id for row in connection.execute(finished)}
    last = {row[0]: row[1] for row in connection.execute(_LAST_EVENTS.where(events.c.run_id.in_(ids)))}
    unchanged = [run.id for run in archived if run.id in there and last.get(run.id, 0) == run.last_event]
    prune.delete_runs(connection, unchanged)
    return len(unchanged)
