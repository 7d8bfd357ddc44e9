"""Time-bounded search for runs by several filters, or by node.

Indexes are intersected window by window, going back. When time is up, the cursor marks how far the search got.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from trainmedic_server.adapters.sql_store.history_page import after_place, alternatives, other_conditions
from trainmedic_server.adapters.sql_store.schema import runs
from trainmedic_server.ports.store import HistoryFilter, values_of

Place = tuple[datetime, str]

SECONDS = 1.0  # Limit of one page; the window in progress is completed.
_FIRST_WINDOW = timedelta(hours=1)
_SHORT = 0.05  # Seconds: a window searched faster is followed by one four times as long.
_BEFORE_ALL = "!"  # Sorts before every run's ID.
_KEYS = {"sqlite": sa.literal_column("runs.rowid", sa.BigInteger)}
"""Column to intersect, if not the ID: every SQLite index has the row number."""
_OLDEST = sa.select(sa.func.min(runs.c.created_at))
_NEWEST = sa.select(sa.func.max(runs.c.created_at))


def is_needed(matching: HistoryFilter) -> bool:
    """Return whether one index is too slow. Open runs and pending undos are few."""
    if matching.is_open or matching.owes_undo:
        return False
    return bool(values_of(matching.node)) or len(list(alternatives(matching))) > 1


def search(
    connection: sa.Connection,
    matching: HistoryFilter,
    limit: int,
    before: Place | None,
    clock: Callable[[], float] = time.monotonic,
    renamed_names: Collection[str] = (),  # of the filter's alerts, those that an alert map renamed
) -> tuple[list[sa.Row[Any]], Place | None]:
    """Return the newest runs and the place after which the next page begins, None at the end."""
    oldest, newest = connection.execute(_OLDEST).scalar(), connection.execute(_NEWEST).scalar()
    if oldest is None or newest is None:
        return [], None
    first = max(oldest, matching.since) if matching.since is not None else oldest
    end = min([newest + timedelta(microseconds=1), *([matching.until] if matching.until is not None else [])])
    if before is not None and before[0] < end:
        end = before[0] + timedelta(microseconds=1)
    rows: list[sa.Row[Any]] = []
    key = _KEYS.get(connection.dialect.name, runs.c.id)
    window, began = _FIRST_WINDOW, clock()
    while end > first:
        begin, asked_at = max(end - window, first), clock()
        rows += connection.execute(
            _in_window(matching, begin, end, before, limit + 1 - len(rows), key, renamed_names)
        ).all()
        if len(rows) > limit:
            return rows[:limit], (rows[limit - 1].created_at, rows[limit - 1].id)
        end, now = begin, clock()
        left = SECONDS - (now - began)
        if left <= 0 and end > first:
            return rows, (end, _BEFORE_ALL)
        window = _next_window(window, now - asked_at, left)
    return rows, None


def _next_window(window: timedelta, took: float, left: float) -> timedelta:
    if took < _SHORT:
        return window * 4
    return max(_FIRST_WINDOW, window * min(2, left / took))  # At most twice as long, to fit into the time left.


def _in_window(
    matching: HistoryFilter,
    begin: datetime,
    end: datetime,
    before: Place | None,
    limit: int,
    key: sa.ColumnElement[Any],
    renamed_names: Collection[str],
) -> sa.Select[Any]:
    common = [runs.c.created_at >= begin, runs.c.created_at < end, *other_conditions(matching, None)]
    found = sa.intersect(
        *(_of_any(group, common, key) for group in alternatives(matching, (begin, end), renamed_names))
    )
    newest = sa.select(runs).where(key.in_(found)).order_by(runs.c.created_at.desc(), runs.c.id.desc()).limit(limit)
    return newest.where(*after_place(before))


def _of_any(
    group: Sequence[sa.ColumnElement[bool]],
    common: Sequence[sa.ColumnElement[bool] | sa.TextClause],
    key: sa.ColumnElement[Any],
) -> sa.Select[Any]:
    every = sa.union_all(*(sa.select(key.label("key")).where(each, *common) for each in group)).subquery()
    return sa.select(every.c.key)
