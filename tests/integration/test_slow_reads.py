"""Reads of the history that take too long, or that nobody waits for, with real databases."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.support.postgres import PostgresServer
from trainmedic_server import errors
from trainmedic_server.adapters.sql_store import database, postgresql, reading
from trainmedic_server.adapters.sql_store.history import SqlHistory
from trainmedic_server.adapters.sql_store.reading import BoundedRead

ENDLESS = {
    "sqlite": "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
    "postgresql": "SELECT pg_sleep(60)",
}


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Engine]:
    """Readers, which connect at their first read."""
    if request.param == "sqlite":
        url = database.parse(f"sqlite:///{tmp_path}/history.db")
        yield database.reader_engine(url, postgresql.TAKEOVER)
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    made = postgresql.reader_engine(server.database())
    yield made
    made.dispose()


def endless(connection: sa.Connection) -> None:
    connection.execute(sa.text(ENDLESS[connection.dialect.name]))


def one(connection: sa.Connection) -> int:
    answer: int = connection.execute(sa.text("SELECT 1")).scalar_one()
    return answer


async def test_a_read_that_takes_too_long_is_ended_and_reported_as_slow(
    engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store does answer, so it is not reported as unavailable; and the next read is answered."""
    history = SqlHistory(engine)
    monkeypatch.setattr(reading, "SECONDS", 0.3)  # the limit that connections of PostgreSQL get
    monkeypatch.setattr("trainmedic_server.adapters.sql_store.history.BoundedRead", lambda: BoundedRead(0.3))
    began = time.monotonic()
    with pytest.raises(errors.StoreSlow, match="took longer than"):
        await history._read(endless)
    assert time.monotonic() - began < 60
    assert await history._read(one) == 1
    history.stop_reading()


async def test_a_read_without_a_client_is_ended(engine: sa.Engine) -> None:
    """All readers are busy; when their clients leave, others are served at once, on working connections."""
    history = SqlHistory(engine)
    reads = [asyncio.create_task(history._read(endless)) for _ in range(database.READERS)]
    await asyncio.sleep(0.2)
    for read in reads:
        read.cancel()
    began = time.monotonic()
    assert await asyncio.gather(*(history._read(one) for _ in range(8))) == [1] * 8
    assert time.monotonic() - began < 60
    assert all(read.cancelled() for read in reads)
    history.stop_reading()


async def test_a_read_cancelled_before_it_had_a_connection_does_not_start(engine: sa.Engine) -> None:
    """A pool, or a database that is slow to connect to, can delay it that long."""
    read = BoundedRead()
    read.cancel()
    with pytest.raises(errors.StoreUnavailable), engine.begin() as connection, read.bounded(connection):
        endless(connection)
    engine.dispose()


async def test_a_database_that_cannot_be_told_to_end_a_read_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancellations wait for it in separate threads; and one that fails is not an error."""
    told, used = threading.Event(), []

    def cancel(_: BoundedRead) -> None:
        used.append(threading.current_thread().name)
        told.wait(120)

    monkeypatch.setattr(BoundedRead, "cancel", cancel)
    history = SqlHistory(
        database.reader_engine(database.parse(f"sqlite:///{tmp_path}/history.db"), postgresql.TAKEOVER)
    )
    reads = [asyncio.create_task(history._read(lambda _: told.wait(120))) for _ in range(database.READERS)]
    await asyncio.sleep(0.2)
    for each in reads:
        each.cancel()
    await asyncio.wait(reads)
    began = time.monotonic()
    await asyncio.gather(*(asyncio.to_thread(int) for _ in range(40)))
    assert time.monotonic() - began < 60
    told.set()
    history.stop_reading()
    assert {name.rpartition("_")[0] for name in used} == {"run-store-canceller"}
