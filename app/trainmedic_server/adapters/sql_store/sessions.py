"""Stored sessions."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

import sqlalchemy as sa

from trainmedic_server.adapters.sql_store.bulk import UnitRecords
from trainmedic_server.adapters.sql_store.columns import Text, TimeColumn, metadata
from trainmedic_server.ports.sessions import Session, StoredSessions

sessions = sa.Table(
    "sessions",
    metadata,
    sa.Column("id", Text, primary_key=True),
    sa.Column("digest", Text, nullable=False),
    sa.Column("name", Text, nullable=False),
    sa.Column("token", Text, nullable=False),
    sa.Column("created_at", TimeColumn, nullable=False),
    sa.Column("ends_at", TimeColumn, nullable=False),
    sa.Column("address", Text, nullable=False),
    sa.Column("browser", Text, nullable=False),
)
# No index: there are few rows, all read at start.


class SqlSessions(UnitRecords, StoredSessions):
    def all(self) -> list[Session]:
        rows = self._connection().execute(sa.select(sessions).order_by(sessions.c.id))
        return [Session(**row) for row in rows.mappings()]

    def add(self, session: Session) -> None:
        values = {column.name: getattr(session, column.name) for column in sessions.c}
        self._connection().execute(sa.insert(sessions).values(values))

    def end(self, ids: Collection[str]) -> None:
        self._connection().execute(sa.delete(sessions).where(sessions.c.id.in_(ids)))

    def end_before(self, moment: datetime) -> None:
        self._connection().execute(sa.delete(sessions).where(sessions.c.ends_at <= moment))
