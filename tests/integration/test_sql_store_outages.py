"""The run store when its database fails: what is said, what is kept, and that it recovers by itself."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.contract.run_store_values import closed, event
from trainmedic_server import errors
from trainmedic_server.adapters.sql_store.database import unavailable
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.ports.store import HistoryFilter, Transaction


class Counter:
    """Counts the calls that failed."""

    count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def failures() -> Counter:
    return Counter()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trainmedic.db"


@pytest.fixture
async def store(file: Path, failures: Counter) -> AsyncIterator[SqlStore]:
    opened = SqlStore.open(f"sqlite:///{file}", on_error=failures, busy_timeout=timedelta(milliseconds=50))
    yield opened
    await opened.close()


async def kinds(store: SqlStore) -> list[str]:
    return [one.kind for one in await store.events_after(0, 1000)]


async def test_a_locked_database_is_unavailable_until_it_is_unlocked(
    file: Path, store: SqlStore, failures: Counter
) -> None:
    """Whoever holds the file, writes fail as StoreUnavailable, reads work, and both work afterwards."""
    await store.transact(lambda tx: tx.append([event("before")]))
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(errors.StoreUnavailable, match="locked") as failed:
        await store.transact(lambda tx: tx.append([event("lost")]))
    assert isinstance(failed.value.__cause__, sa.exc.OperationalError)
    with pytest.raises(errors.StoreUnavailable):
        await store.check()
    assert await kinds(store) == ["before"]
    assert failures.count == 2
    other.execute("ROLLBACK")
    other.close()
    await store.check()
    await store.transact(lambda tx: tx.append([event("after")]))
    assert await kinds(store) == ["before", "after"]
    assert failures.count == 2


@contextmanager
def no_room_beyond(size: int) -> Iterator[None]:
    """No file of this process can grow beyond `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


async def test_a_full_disk_loses_no_acknowledged_data(file: Path, store: SqlStore, failures: Counter) -> None:
    """A write that does not fit is rejected with its whole transaction; with free space, writes work again."""
    await store.transact(lambda tx: tx.append([event("before")]))
    log = file.with_name(file.name + "-wal")
    with no_room_beyond(log.stat().st_size + 20_000):
        outcomes = await asyncio.gather(
            store.transact(lambda tx: tx.append([event("small")])),
            store.transact(lambda tx: tx.append([event("large", text="x" * 100_000)])),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes] == [errors.StoreExplained] * 2
        assert failures.count == 2
        await store.transact(lambda tx: tx.append([event("fits")]))
        with pytest.raises(errors.StoreUnavailable):
            await store.transact(lambda tx: tx.append([event("large", text="x" * 100_000)]))
        assert await kinds(store) == ["before", "fits"]
    await store.check()
    await store.transact(lambda tx: tx.append([event("after")]))
    assert await kinds(store) == ["before", "fits", "after"]


async def test_after_a_failed_write_the_check_writes(file: Path, store: SqlStore) -> None:
    """A database that is only readable is not ready; the check reports it until a write succeeds."""
    await store.transact(lambda tx: tx.append([event("before")]))
    log = file.with_name(file.name + "-wal")
    await kinds(store)  # a reader keeps the log in being
    with no_room_beyond(log.stat().st_size):
        await store.check()
        with pytest.raises(errors.StoreUnavailable):
            await store.transact(lambda tx: tx.append([event("lost")]))
        for _ in range(3):
            await store.transact(lambda tx: tx.controls())
            with pytest.raises(errors.StoreUnavailable):
                await store.check()
    await store.check()


async def test_a_file_that_is_not_a_database_is_unavailable(file: Path) -> None:
    """The start fails with the file's name, and the file is closed."""
    file.write_bytes(b"this is not a database" * 1000)
    url = f"sqlite:///{file}"
    for _ in range(2):
        with pytest.raises(errors.StoreUnavailable, match=r"trainmedic\.db could not be opened.*not a database"):
            SqlStore.open(url)
    file.unlink()
    await SqlStore.open(url).close()


async def test_a_damaged_database_is_unavailable_until_it_is_restored(file: Path) -> None:
    """Damage is reported, not served; a backup in its place is served."""
    store = SqlStore.open(f"sqlite:///{file}")
    runs = [closed(number) for number in range(200)]
    await store.transact(lambda tx: tx.add_runs(runs))
    await store.close()
    whole = file.read_bytes()
    file.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    with pytest.raises(errors.StoreUnavailable, match="malformed"):
        SqlStore.open(f"sqlite:///{file}")
    file.write_bytes(whole)
    store = SqlStore.open(f"sqlite:///{file}")
    assert len([one async for one in store.stream(HistoryFilter())]) == 200
    await store.close()


async def test_a_failing_read_fails_all_that_share_its_transaction(file: Path, store: SqlStore) -> None:
    """A transaction in which the database failed is discarded entirely; reading the history reports the same."""
    one = closed()
    await store.transact(lambda tx: tx.add_runs([one]))
    other = sqlite3.connect(file)
    other.execute("ALTER TABLE steps RENAME TO gone")
    outcomes = await asyncio.gather(
        store.transact(lambda tx: tx.append([event("lost")])),
        store.transact(lambda tx: tx.run(one.id)),
        store.record(one.id),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [errors.StoreUnavailable] * 3
    other.execute("ALTER TABLE gone RENAME TO steps")
    other.close()
    assert await store.transact(lambda tx: tx.run(one.id)) == one
    assert await kinds(store) == []


async def test_a_bad_value_fails_its_own_unit_only(store: SqlStore, failures: Counter) -> None:
    """A value that the database or JSON cannot hold fails its unit; others in the transaction are kept."""
    outcomes = await asyncio.gather(
        store.transact(lambda tx: tx.append([event("one")])),
        store.transact(lambda tx: tx.append([event("no JSON", value=object())])),
        store.transact(lambda tx: tx.append([event("no text \ud800")])),
        store.transact(lambda tx: tx.append([event("two")])),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [type(None), TypeError, UnicodeEncodeError, type(None)]
    assert await kinds(store) == ["one", "two"]
    assert failures.count == 0


async def test_no_error_of_a_unit_ends_the_writer(store: SqlStore) -> None:
    """This includes errors that asyncio or a thread would not handle."""

    def stops(tx: Transaction) -> None:
        next(iter([]))

    class Leaving(BaseException):
        """Like SystemExit, which an event loop would obey."""

    def leaves(tx: Transaction) -> None:
        raise Leaving

    with pytest.raises(RuntimeError, match="StopIteration"):
        await store.transact(stops)
    with pytest.raises(Leaving):
        await store.transact(leaves)
    await store.transact(lambda tx: tx.append([event("after")]))
    assert await kinds(store) == ["after"]


async def test_reads_do_not_wait_for_a_writer(store: SqlStore) -> None:
    """A long unit delays no reader; its writes are visible once it is done."""
    entered, leave = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def work(tx: Transaction) -> None:
        tx.append([event("slow")])
        tx.add_runs([closed()])
        tx.unfinished()
        loop.call_soon_threadsafe(entered.set)
        asyncio.run_coroutine_threadsafe(leave.wait(), loop).result(60)

    writing = asyncio.ensure_future(store.transact(work))
    await entered.wait()
    assert await kinds(store) == []
    assert await store.page(HistoryFilter(), 10, None) == ([], None)
    leave.set()
    await writing
    assert await kinds(store) == ["slow"]


async def test_a_cancelled_caller_costs_nothing(store: SqlStore) -> None:
    """Cancelling a waiting call does not disturb the others."""
    calls = [asyncio.ensure_future(store.transact(lambda tx: tx.append([event()]))) for _ in range(10)]
    await asyncio.sleep(0)
    calls[3].cancel()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [index for index, outcome in enumerate(outcomes) if outcome is not None] == [3]


@pytest.mark.parametrize(
    ("statement", "uri", "reason"),
    [
        ("INSERT INTO one VALUES (zeroblob(100000))", "file:{}", "its disk is full"),
        ("INSERT INTO one VALUES (1)", "file:{}?mode=ro", "its file or filesystem is read-only"),
        ("SELECT * FROM one", "file:{}.other", None),
    ],
)
def test_a_known_reason_of_an_outage_is_named(statement: str, uri: str, reason: str | None, tmp_path: Path) -> None:
    """SQLite's own errors state it. Others have none."""
    path = tmp_path / "store"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE one (two)")
    with closing(sqlite3.connect(uri.format(path), uri=True)) as connection:
        connection.execute("PRAGMA max_page_count = 3")
        with pytest.raises(sqlite3.Error) as caught:
            connection.execute(statement)
    assert getattr(unavailable("it failed", caught.value), "reason", None) == reason
