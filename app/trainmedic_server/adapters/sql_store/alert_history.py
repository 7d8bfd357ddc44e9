"""Lists of received alerts."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from trainmedic_server.adapters.sql_store import history_cursor, mapping
from trainmedic_server.adapters.sql_store.columns import Text, TimeColumn, encode_json
from trainmedic_server.adapters.sql_store.history import SqlHistory
from trainmedic_server.adapters.sql_store.schema import alerts, runs
from trainmedic_server.domain.alert import AlertRecord, AlertStatus, Identity
from trainmedic_server.domain.run import Status
from trainmedic_server.ports.received_alerts import ReceivedAlertFilter, ReceivedAlerts

_IDS_PER_QUERY = 500  # far below the 32,766 values that SQLite takes in a statement
_KEY = sa.tuple_(alerts.c.first_heard_at, alerts.c.fingerprint, alerts.c.starts_at)


class SqlAlertHistory(SqlHistory, ReceivedAlerts):
    async def alerts_page(
        self, matching: ReceivedAlertFilter, limit: int, cursor: str | None
    ) -> tuple[list[AlertRecord], str | None]:
        before = _decoded(cursor) if cursor is not None else None
        page = await self._read(
            lambda connection: [
                mapping.alert_of(row) for row in connection.execute(alerts_select(matching, limit + 1, before))
            ]
        )
        if len(page) <= limit:
            return page, None
        return page[:limit], _encoded(page[limit - 1])

    async def statuses_of(self, run_ids: Collection[str]) -> dict[str, Status]:
        ids = list(run_ids)

        def work(connection: sa.Connection) -> dict[str, Status]:
            statuses: dict[str, Status] = {}
            for first in range(0, len(ids), _IDS_PER_QUERY):
                chosen = runs.c.id.in_(ids[first : first + _IDS_PER_QUERY])
                rows = connection.execute(sa.select(runs.c.id, runs.c.status).where(chosen))
                statuses |= {run_id: Status(status) for run_id, status in rows}
            return statuses

        return await self._read(work)


def alerts_select(
    matching: ReceivedAlertFilter, limit: int, before: tuple[datetime, Identity] | None = None
) -> sa.Select[Any]:
    if matching.alertname is None:
        return _page(matching, limit, before)
    # By either name, as sent or as an alert map wrote it, each with its own index.
    names = (alerts.c.alert_name, alerts.c.original_name)
    parts = [_page(matching, limit, before, name == matching.alertname).subquery() for name in names]
    either = sa.union(*(sa.select(part) for part in parts)).subquery()
    return sa.select(either).order_by(*_newest_first(either.c)).limit(limit)


def _newest_first(columns: Any) -> tuple[sa.ColumnElement[Any], ...]:
    return columns.first_heard_at.desc(), columns.fingerprint.desc(), columns.starts_at.desc()


def _page(
    matching: ReceivedAlertFilter,
    limit: int,
    before: tuple[datetime, Identity] | None,
    *conditions: sa.ColumnElement[bool],
) -> sa.Select[Any]:
    columns = alerts.c
    statement = sa.select(alerts).where(*conditions).order_by(*_newest_first(columns)).limit(limit)
    if matching.status is not None:
        is_firing = columns.resolved_at.is_(None)
        statement = statement.where(is_firing if matching.status is AlertStatus.FIRING else sa.not_(is_firing))
    if matching.since is not None:
        statement = statement.where(columns.last_heard_at >= matching.since)
    if matching.until is not None:
        statement = statement.where(columns.first_heard_at < matching.until)
    if matching.reacted is not None:
        statement = statement.where(columns.reacted if matching.reacted else sa.not_(columns.reacted))
    for name, value in matching.labels.items():
        statement = statement.where(_has_label(name, value))
    if before is not None:
        first_heard_at, (fingerprint, starts_at) = before
        last = sa.tuple_(
            sa.literal(first_heard_at, TimeColumn), sa.literal(fingerprint), sa.literal(starts_at, TimeColumn)
        )
        statement = statement.where(last > _KEY)
    return statement


def _has_label(name: str, value: str) -> sa.ColumnElement[bool]:
    """Search the stored JSON for the member. Label names with quotes, ``:`` and ``,`` may match wrongly."""
    member = encode_json({name: value})[1:-1]
    written = [sa.type_coerce(column, Text) for column in (alerts.c.labels, alerts.c.original_labels)]
    # Not LIKE: SQLite's ignores case.
    return sa.or_(*(sa.func.replace(each, member, "", type_=Text) != each for each in written))


def _encoded(last: AlertRecord) -> str:
    beginning = history_cursor.microseconds_of(last.alert.starts_at)
    return history_cursor.encode(last.first_heard_at, f"{beginning}.{last.alert.fingerprint}")


def _decoded(cursor: str) -> tuple[datetime, Identity]:
    first_heard_at, rest = history_cursor.decode(cursor)
    beginning, _, fingerprint = rest.partition(".")
    try:
        return first_heard_at, Identity(fingerprint, history_cursor.time_of(int(beginning)))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{cursor[:80]!r} is not a cursor of the alerts") from error
