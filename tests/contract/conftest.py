"""The stores that the run store's contract is held against."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import pytest

from tests.support.opened_stores import open_store
from tests.support.postgres import PostgresServer
from trainmedic_server.adapters.sql_store import schema
from trainmedic_server.adapters.sql_store.in_memory import InMemoryStore
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.adapters.sql_store.writer import UnitOfWork

_EMPTY = [f"DELETE FROM {table.name}" for table in reversed(schema.metadata.sorted_tables)]
_EMPTY += [
    f"ALTER SEQUENCE {table.name}_seq_seq RESTART" for table in schema.metadata.tables.values() if "seq" in table.c
]


@pytest.fixture(scope="session")
def shared_database(shared_postgres: PostgresServer) -> str:
    """The URL of a database that one test after the other has; each leaves it empty."""
    return shared_postgres.database()


def forget_before_each_transaction(opened: SqlStore) -> None:
    """Have the writer remember nothing, as if others wrote as well, so that it asks the tables each time."""
    committer = opened._writer._committer
    commit = committer.commit

    def forgetful(units: list[UnitOfWork]) -> None:
        committer._cache.forget()
        commit(units)

    committer.commit = forgetful


@pytest.fixture(params=["memory", "sqlite", "sqlite, as if others wrote too", "postgresql"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SqlStore]:
    if request.param == "memory":
        yield InMemoryStore()
        return
    if request.param == "postgresql":
        url: str = request.getfixturevalue("shared_database")
        opened = open_store(url)
        yield opened
        await opened.close()
        # Emptied, not made anew: its tables take longer than most tests.
        with psycopg.connect(url) as connection:
            connection.execute("; ".join(_EMPTY).encode())
        return
    opened = SqlStore.open(f"sqlite:///{tmp_path}/state/trainmedic.db")
    if request.param != "sqlite":
        forget_before_each_transaction(opened)
    yield opened
    await opened.close()
