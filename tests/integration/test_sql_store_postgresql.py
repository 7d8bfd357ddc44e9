"""The run store on PostgreSQL, beyond its contract: its schema, its session and lock, and how it loses them."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from tests.contract import run_store_values as values
from tests.contract.run_store_values import at, closed, event, run
from tests.support.opened_stores import open_store
from tests.support.postgres import PASSWORD, PostgresServer
from tests.support.programs import eventually
from trainmedic_server import errors
from trainmedic_server.adapters.sql_store import postgresql, revision, schema
from trainmedic_server.adapters.sql_store.election import Election
from trainmedic_server.adapters.sql_store.history_page import page_select
from trainmedic_server.adapters.sql_store.postgresql import LockSession
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.ports.store import HistoryFilter, Transaction

SLOW = timedelta(seconds=60)
"""So long that no machine is too busy."""
QUICK = timedelta(seconds=2)
PATIENCE = 120.0


class Lost:
    """Notes why a session was lost, where a server would end."""

    def __init__(self) -> None:
        self.why: str | None = None
        self._happened = threading.Event()

    def __call__(self, why: str) -> None:
        self.why = why
        self._happened.set()

    async def happened(self) -> str:
        assert await asyncio.to_thread(self._happened.wait, PATIENCE)
        assert self.why is not None
        return self.why


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.database()


@pytest.fixture
def lost() -> Lost:
    return Lost()


@pytest.fixture
async def store(url: str, lost: Lost) -> AsyncIterator[SqlStore]:
    opened = led(url, lost)
    yield opened
    await opened.close()


def led(url: str, lost: Lost, takeover: timedelta = SLOW) -> SqlStore:
    return open_store(url, takeover, lost)


async def kinds(store: SqlStore) -> list[str]:
    return [one.kind for one in await store.events_after(0, 1000)]


# --- the schema -------------------------------------------------------------------------------------


def test_the_migrations_create_exactly_the_schema(url: str) -> None:
    """From an empty database Alembic finds no difference, and text is sorted by its bytes."""
    session = LockSession.open(url)
    with session.engine.connect() as connection:
        with connection.begin():
            revision.bring_to_head(connection)
        assert revision.current(connection) == schema.HEAD
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, schema.metadata) == []
        found = connection.exec_driver_sql(
            "SELECT count(*) FROM information_schema.columns WHERE table_schema = 'public' AND data_type = 'text'"
            " AND collation_name IS DISTINCT FROM 'C'"
        )
        assert found.scalar() == 0
    session.close()


async def test_a_standby_rejects_an_older_schema_without_waiting(url: str, store: SqlStore) -> None:
    """Another server uses the schema: this one reports at its start that it cannot take over, and changes nothing."""
    await store.transact(lambda tx: _set_revision(tx, "0017"))
    with pytest.raises(errors.ConfigurationError, match=f"'0017'.*'{revision.FIRST}'.*{revision.EARLIER_RELEASE}"):
        await asyncio.wait_for(Election(url).win(), PATIENCE)
    assert await store.transact(lambda tx: revision.current(tx.flushed_connection())) == "0017"  # type: ignore[attr-defined]


def _set_revision(tx: Any, number: str) -> None:
    tx.flushed_connection().execute(sa.text("UPDATE alembic_version SET version_num = :number"), {"number": number})


def plan_of(connection: sa.Connection, wanted: HistoryFilter) -> list[str]:
    """How PostgreSQL reads a page of the history in the middle."""
    text = str(page_select(wanted, 100, (at(5), "id")).compile(connection, compile_kwargs={"literal_binds": True}))
    return [row[0] for row in connection.exec_driver_sql("EXPLAIN " + text.replace("%", "%%"))]


def test_a_page_of_the_history_is_read_from_an_index_in_order(url: str) -> None:
    """Each filter on a column has an index in the order of the pages."""
    session = LockSession.open(url)
    with session.engine.connect() as connection, connection.begin():
        revision.bring_to_head(connection)
        connection.exec_driver_sql(
            "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_sort = off"
        )
        for name in ("alertname", "playbook", "status", "decision", "gpu", "job"):
            plan = plan_of(connection, HistoryFilter(**{name: "a"}))
            assert "Incremental Sort" in plan[1], plan  # of runs of the same moment
            assert any("Index Scan Backward using ix_runs_" in step for step in plan), plan
        # A node is that of the target or one that was touched: two indexes, whose runs are then put in order.
        plan = plan_of(connection, HistoryFilter(node="a"))
        assert not any("Seq Scan" in step for step in plan), plan
    session.close()


async def test_a_name_of_maximum_length_fits_every_index(store: SqlStore) -> None:
    """Each of its characters takes four bytes."""
    name = "\U0001f9d1" * 128
    await store.transact(lambda tx: tx.add_runs([run(target=values.gpu(0, node=name))]))
    await store.transact(lambda tx: tx.remember_nodes([name], at(0)))
    assert await store.transact(lambda tx: tx.nodes_acted_on(at(-5))) == {name}


# --- the URL ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("postgresql://u:hunter2@h:notaport/d", "cannot be read"),
        ("postgresql://u:hunter2@h:99999/d", "cannot be read"),
        ("postgresql://u:hunter2@h:0/d", "cannot be read"),
        ("postgresql://u:hunter2@h/d?no_such_option=1", "cannot be read"),
        ("postgresql+asyncpg://u:hunter2@h/d", r"write postgresql://"),
        ("postgresql://u:hunter2@{host}/d?sslmode=some", 'invalid sslmode value: "some"'),
        ("postgresql://u:hunter2@{host}/d?connect_timeout=soon", "bad value for connect_timeout"),
        ("postgresql://u:hunter2@{host}/d?tcp_user_timeout=soon", 'invalid integer value "soon"'),
        ("postgresql://u:hunter2@{host}/d?ssl_min_protocol_version=x", 'invalid "ssl_min_protocol_version" value'),
        ("postgresql://trainmedic:{password}@{host}/postgres?client_encoding=x", "invalid value for parameter"),
        ("postgresql://trainmedic:{password}@{host}/postgres?options=-cnone%3D1", "unrecognized configuration"),
        ("postgresql://trainmedic:hunter2@{host}/postgres", "password authentication failed"),
        ("postgresql://trainmedic:{password}@{host}/none", "does not exist"),
    ],
)
def test_an_unusable_url_is_rejected_without_its_password(postgres: PostgresServer, wrong: str, told: str) -> None:
    """The error is a ConfigurationError that gives the reason."""
    with pytest.raises(errors.ConfigurationError, match=told) as refused:
        SqlStore.open(wrong.format(host=f"127.0.0.1:{postgres.port}", password=PASSWORD))
    assert "hunter2" not in str(refused.value)
    assert PASSWORD not in str(refused.value)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_every_spelling_of_the_scheme_is_accepted(url: str, scheme: str) -> None:
    """The spellings are those of SQLAlchemy, libpq and database providers."""
    LockSession.open(url.replace("postgresql", scheme, 1)).close()


# --- one of several ---------------------------------------------------------------------------------


def test_one_session_has_the_lock_and_states_its_address(url: str) -> None:
    """The second session learns of the first, and gets the lock once that one is gone."""
    first, second = LockSession.open(url, address="10.0.0.1:8080"), LockSession.open(url, address="10.0.0.2:8080")
    assert first.take_lock()
    assert not second.take_lock()
    assert second.holder() == "10.0.0.1:8080"
    first.close()
    # PostgreSQL ends a session some moments after its client has gone.
    assert eventually(second.take_lock, 60, "the lock of a session that was closed")
    second.close()


def test_an_address_that_postgresql_would_truncate_is_not_stated(url: str) -> None:
    """Standbys would forward requests to another host."""
    address = f"trainmedic-0.{'a' * 40}.example:8080"
    first, second = LockSession.open(url, address=address), LockSession.open(url)
    assert first.take_lock()
    assert second.holder() == ""
    first.close()
    second.close()


def test_each_schema_has_a_lock_of_its_own(url: str) -> None:
    """Two installations can share a database."""
    with psycopg.connect(url) as connection:
        connection.execute("CREATE SCHEMA other")
    here, there = LockSession.open(url), LockSession.open(f"{url}?options=-csearch_path%3Dother")
    assert here.take_lock()
    assert there.take_lock()
    for one in (here, there):
        one.close()


async def test_a_server_whose_session_is_cut_writes_nothing_more(
    postgres: PostgresServer, url: str, store: SqlStore, lost: Lost
) -> None:
    """It learns it at once, may not act, and does not reconnect; another continues with the stored data."""
    await store.transact(lambda tx: tx.append([event("before")]))
    assert postgres.cut() == 1
    assert "ended the session" in await lost.happened()
    with pytest.raises(errors.StoreUnavailable):
        store.fence()
    for _ in range(3):
        with pytest.raises(errors.StoreUnavailable):
            await store.transact(lambda tx: tx.append([event("too late")]))
    other = led(url, Lost())
    assert await kinds(other) == ["before"]
    await other.close()


async def test_a_session_cut_within_a_transaction_discards_it(
    postgres: PostgresServer, store: SqlStore, lost: Lost
) -> None:
    """Waiting callers learn that the store is unavailable."""

    def work(tx: Transaction) -> None:
        tx.append([event("half")])
        tx.events_of("sends what is pending", "half")
        postgres.cut()
        tx.controls()

    with pytest.raises(errors.StoreUnavailable):
        await store.transact(work)
    await lost.happened()
    assert await kinds(store) == []


async def test_a_server_that_hangs_loses_its_session(url: str, lost: Lost) -> None:
    """PostgreSQL ends it when it is silent for the takeover time, and the server gives up before."""
    store = led(url, lost, QUICK)
    entered, leave = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hang(tx: Transaction) -> None:
        tx.append([event("hung")])
        tx.controls()
        loop.call_soon_threadsafe(entered.set)
        leave.wait(PATIENCE)

    hanging = asyncio.ensure_future(store.transact(hang))
    # A machine that is busy enough has the session lost before the transaction begins.
    entering = asyncio.ensure_future(entered.wait())
    await asyncio.wait({hanging, entering}, return_when=asyncio.FIRST_COMPLETED)
    entering.cancel()
    waiting = Election(url, QUICK)
    async with asyncio.timeout(PATIENCE):
        session = await waiting.win()
    assert "has not answered" in await lost.happened()
    leave.set()
    with pytest.raises(errors.StoreUnavailable):
        await hanging
    session.close()
    await store.close()


async def test_a_slow_unit_of_work_does_not_end_the_process_of_a_test(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server on PostgreSQL replaces its process when its session is lost. Here the caller gets the error."""
    replaced: list[Any] = []
    monkeypatch.setattr(os, "_exit", replaced.append)
    monkeypatch.setattr(os, "execv", lambda program, command: replaced.append(command))

    def work_slowly(tx: Transaction) -> None:
        tx.controls()
        time.sleep(2 * QUICK.total_seconds())

    store = open_store(url, QUICK)
    with pytest.raises(errors.StoreUnavailable):
        await store.transact(work_slowly)
    await store.close()
    assert replaced == []


async def test_a_session_changing_proxy_is_detected(url: str, lost: Lost) -> None:
    """A transaction pooler uses a session without a lock for the next transaction."""
    store = led(url, lost, timedelta(seconds=30))
    unlock = sa.text("SELECT pg_advisory_unlock_all()")
    await store.transact(lambda tx: tx.flushed_connection().execute(unlock) and None)  # type: ignore[attr-defined]
    assert "pool" in await lost.happened()
    with pytest.raises(errors.StoreUnavailable):
        await store.transact(lambda tx: tx.controls())
    await store.close()


async def test_a_locked_table_is_an_outage_but_not_the_end(url: str, lost: Lost) -> None:
    """Writes fail as StoreUnavailable until it is unlocked; the session survives."""
    # Through a connection that waits less for locks than a server's own does: a test has no time.
    store = led(url, lost)
    await store.transact(lambda tx: tx.flushed_connection().execute(sa.text("SET lock_timeout = 100")) and None)  # type: ignore[attr-defined]
    with psycopg.connect(url) as other:
        other.execute("LOCK TABLE events")
        with pytest.raises(errors.StoreUnavailable, match="lock timeout"):
            await store.transact(lambda tx: tx.append([event("lost")]))
        with pytest.raises(errors.StoreUnavailable):
            await store.transact(lambda tx: tx.append([event("lost too")]))
        await store.check()
    await store.transact(lambda tx: tx.append([event("after")]))
    assert await kinds(store) == ["after"]
    assert lost.why is None
    store.fence()
    await store.close()


async def test_a_missing_table_is_an_outage(url: str, store: SqlStore) -> None:
    """No unit is at fault: all that share the transaction learn that the store is unavailable."""
    one = closed()
    await store.transact(lambda tx: tx.add_runs([one]))
    with psycopg.connect(url, autocommit=True) as other:
        other.execute("ALTER TABLE steps RENAME TO gone")
        outcomes: list[Any] = await asyncio.gather(
            store.transact(lambda tx: tx.append([event("lost")])),
            store.transact(lambda tx: tx.run(one.id)),
            store.record(one.id),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes] == [errors.StoreUnavailable] * 3
        other.execute("ALTER TABLE gone RENAME TO steps")
    assert await store.transact(lambda tx: tx.run(one.id)) == one


async def test_a_rejected_statement_fails_only_its_own_unit(store: SqlStore) -> None:
    """After an error PostgreSQL rejects the rest of a transaction; the units that shared it are kept all the same."""

    def asks_for_nonsense(tx: Transaction) -> None:
        tx.append([event("nonsense")])
        tx.flushed_connection().execute(sa.text("SELECT 1 / 0"))  # type: ignore[attr-defined]

    outcomes = await asyncio.gather(
        store.transact(lambda tx: tx.append([event("one")])),
        store.transact(asks_for_nonsense),
        store.transact(lambda tx: tx.run("no\x00ne")),
        store.transact(lambda tx: tx.append([event("two")])),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [type(None), sa.exc.DataError, sa.exc.DataError, type(None)]
    assert await kinds(store) == ["one", "two"]


async def test_an_election_is_won_once_the_database_answers(postgres: PostgresServer, url: str) -> None:
    """While it accepts no connections a server waits and reports it; the history is read again afterwards."""
    name = url.rpartition("/")[2]
    reading = postgresql.reader_engine(url)
    with reading.connect() as connection:
        assert connection.exec_driver_sql("SELECT 1").scalar() == 1
    postgres.ask(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
    postgres.ask("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
    election = Election(url)
    coming = asyncio.ensure_future(election.win())
    while election.why != "PostgreSQL does not answer":
        await asyncio.sleep(0.01)
    postgres.ask(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    async with asyncio.timeout(PATIENCE):
        session = await coming
    with reading.connect() as connection:
        assert connection.exec_driver_sql("SELECT 1").scalar() == 1
    reading.dispose()
    session.close()
