"""How PostgreSQL answers where it knows nothing of what is in a table, as in a new database and after a restore."""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from tests.contract.run_store_values import closed
from tests.support.opened_stores import open_store
from tests.support.postgres import PostgresServer
from trainmedic_server.adapters.sql_store import revision, statements
from trainmedic_server.adapters.sql_store.lookup import Lookup
from trainmedic_server.adapters.sql_store.postgresql import LockSession


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.database()


def plan_of(connection: sa.Connection, statement: sa.Select[Any]) -> str:
    compiled = statement.compile(connection, compile_kwargs={"literal_binds": True})
    return "\n".join(row[0] for row in connection.exec_driver_sql("EXPLAIN " + str(compiled).replace("%", "%%")))


@pytest.mark.parametrize(
    ("lookup", "key", "index"),
    [
        (statements.LAST_ENDED, "target_key", "ix_runs_cooldown"),
        (statements.LAST_ENDED_UNOBSERVED, "target_key", "ix_runs_cooldown"),
        (statements.COUNT_ALERTS, "run_id", "run_alerts"),
    ],
)
def test_batched_lookups_use_an_index_for_each_item(url: str, lookup: Lookup, key: str, index: str) -> None:
    """This holds without table statistics, too, as in the first storm of a new database."""
    session = LockSession.open(url)
    with session.engine.connect() as connection, connection.begin():
        revision.bring_to_head(connection)
        statement = lookup.statement.params(keys="a", playbook="a")
        plan = plan_of(connection, statement)
    session.close()
    assert re.search(rf"using \S*{index}|Index Scan on \S*{index}", plan), plan
    assert re.search(rf"Index Cond: .*\b{key} = ", plan), plan


async def test_a_restored_store_is_analyzed_when_it_is_opened(url: str) -> None:
    """Otherwise a page's steps are searched in the whole table; -1 means that there are no statistics."""
    store = open_store(url)
    with psycopg.connect(url) as connection:
        for table in ("steps", "orders"):
            connection.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = false)".encode())
    await store.transact(lambda tx: tx.add_runs([closed(number) for number in range(20)]))
    await store.close()
    await open_store(url).close()
    with psycopg.connect(url) as connection:
        known = connection.execute("SELECT relname, reltuples FROM pg_class WHERE relname IN ('steps', 'orders')")
        assert dict(known.fetchall()) == {"steps": 20, "orders": -1}
