"""The tables of a run store as a test sees them beside the server: their definitions and their rows.

Used by the tests of migrations and upgrades. The server need not run; nothing here takes its lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from trainmedic_server.adapters.sql_store import database, postgresql

_COLUMNS = """
SELECT table_name, column_name, ordinal_position, data_type, is_nullable, column_default, collation_name
FROM information_schema.columns WHERE table_schema = 'public'
"""
_INDEXES = "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'"
_CONSTRAINTS = """
SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
WHERE connamespace = 'public'::regnamespace
"""


@contextlib.contextmanager
def connected(url: str) -> Iterator[sa.Connection]:
    """Yield a connection in a transaction, which is committed at the end."""
    with contextlib.ExitStack() as stack:
        if postgresql.is_postgresql(url):
            session = postgresql.LockSession.open(url)
            stack.callback(session.close)
            engine = session.engine
        else:
            engine = database.writer_engine(sa.make_url(url), timedelta(seconds=5))
            stack.callback(engine.dispose)
        with engine.begin() as connection:
            yield connection


def definitions(connection: sa.Connection) -> set[tuple[Any, ...]]:
    """All columns with their order and types, indexes and constraints; of SQLite the statements that made them."""
    if connection.dialect.name == "postgresql":
        return {tuple(row) for query in (_COLUMNS, _INDEXES, _CONSTRAINTS) for row in connection.exec_driver_sql(query)}
    made = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master")
    return {(name, " ".join((sql or "").replace(" ,", ",").split())) for name, sql in made}


def rows(connection: sa.Connection) -> dict[str, list[Any]]:
    """The rows of every table, in the order of their text."""
    names = sa.inspect(connection).get_table_names()
    return {name: sorted(map(repr, connection.exec_driver_sql(f'SELECT * FROM "{name}"'))) for name in names}
