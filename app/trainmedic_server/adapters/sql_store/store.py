"""The run store, opened and migrated."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa
from msgspec import Struct

from trainmedic_server import errors
from trainmedic_server.adapters.sql_store import database, old_runs, postgresql, prune, revision, schema
from trainmedic_server.adapters.sql_store.alert_history import SqlAlertHistory
from trainmedic_server.adapters.sql_store.finding_history import SqlFindingHistory
from trainmedic_server.adapters.sql_store.leadership import Leadership, restart_process
from trainmedic_server.adapters.sql_store.playbook_versions import SqlPlaybookVersions
from trainmedic_server.adapters.sql_store.transaction import SqlTransaction
from trainmedic_server.adapters.sql_store.writer import Committer, StoreWriter
from trainmedic_server.ports.archive import RunArchive
from trainmedic_server.ports.fence import Fence, no_fence
from trainmedic_server.ports.store import RunStore, Transaction

T = TypeVar("T")


class UnitRunner(Protocol):
    @property
    def failing(self) -> bool: ...

    async def transact(self, work: Callable[[SqlTransaction], Any]) -> Any:
        """Return after the commit. Raises the errors of `work`, and StoreUnavailable."""
        ...

    def close(self) -> None: ...


class StoreLock(Protocol):
    def release(self) -> None: ...


class SqlStore(SqlFindingHistory, SqlAlertHistory, SqlPlaybookVersions, RunStore):
    def __init__(
        self,
        writer: UnitRunner,
        readers: sa.Engine,
        lock: StoreLock,
        on_error: Callable[[], object],
        fence: Fence = no_fence,
    ) -> None:
        super().__init__(readers)
        self._writer = writer
        self._lock = lock
        self._fence = fence
        self._on_error = on_error
        self._is_closing = False

    @classmethod
    def open(
        cls,
        url: str,
        *,
        on_error: Callable[[], object] = lambda: None,
        busy_timeout: timedelta = timedelta(seconds=5),
    ) -> SqlStore:
        """Return the store with its schema up to date. Blocks.

        `on_error` is called on the event loop after each transaction that raises StoreUnavailable. Raises
        ConfigurationError if the URL, directory or schema is unusable or another server uses the store;
        StoreUnavailable.
        """
        if postgresql.is_postgresql(url):
            return cls._open_postgresql(url, on_error)
        parsed = database.parse(url)
        database.make_directory(parsed)
        lock = database.OwnerLock(parsed)
        try:
            engine = database.writer_engine(parsed, busy_timeout)
            with database.translated(f"the run store at {database.file_of(parsed)} could not be opened"):
                lock.take_identity(_migrate(engine))
            writer = StoreWriter(Committer(engine, require=lock.require))
        except BaseException:
            lock.release()
            raise
        return cls(writer, database.reader_engine(parsed, busy_timeout), lock, on_error)

    @classmethod
    def _open_postgresql(cls, url: str, on_error: Callable[[], object]) -> SqlStore:
        session = postgresql.LockSession.open(url)
        try:
            if not session.take_lock():
                raise errors.ConfigurationError("the database is in use by another server; stop it first")
        except BaseException:
            session.close()
            raise
        return cls.of_session(session, on_error=on_error)

    @classmethod
    def of_session(
        cls,
        session: postgresql.LockSession,
        *,
        on_error: Callable[[], object] = lambda: None,
        on_lost: Callable[[str], object] = restart_process,
    ) -> SqlStore:
        """`session` must have the lock. Blocks. Raises as `open`.

        `on_lost` is called on some thread when the session is over or unreliable; default: restart the process.
        """
        try:
            with database.translated("the run store in PostgreSQL could not be opened"):
                _migrate(session.engine)
            leadership = session.begin_leadership(on_lost)
        except BaseException:
            session.close()
            raise
        writer = StoreWriter(Committer(session.engine, leadership), leadership)
        lock = _SessionLock(session, leadership)
        return cls(writer, postgresql.reader_engine(session.url), lock, on_error, leadership.require)

    def fence(self) -> None:
        """Without leadership, restart the process or raise StoreUnavailable."""
        self._fence()

    async def transact(self, work: Callable[[Transaction], T]) -> T:
        return await self._transact(work)

    async def check(self) -> None:
        # After a failure only a write shows that the store works again.
        await self._transact(_rewrite_controls if self._writer.failing else _read_controls)

    async def prune(self, older_than: datetime, archive: RunArchive | None = None) -> int:
        if archive is not None:
            pruned = await old_runs.delete_archived(archive, self._read, self._delete, older_than)
        else:
            pruned = await self._delete_all(prune.delete_runs_before, older_than)
        for batch in prune.OTHER_BATCHES:
            await self._delete_all(batch, older_than)
        surplus = await self._read(prune.count_surplus_alerts)
        while surplus > 0 and (deleted := await self._delete(partial(prune.delete_surplus_alerts, most=surplus))):
            surplus -= deleted
        return pruned

    async def _delete_all(self, batch: Callable[..., int], older_than: datetime) -> int:
        pruned = 0
        while deleted := await self._delete(partial(batch, before=older_than)):
            pruned += deleted
            if deleted < prune.BATCH:
                break
        return pruned

    async def _delete(self, work: Callable[[SqlTransaction], int]) -> int:
        began = time.monotonic()
        deleted = await self._transact(work)
        await asyncio.sleep((time.monotonic() - began) * prune.PAUSE_FACTOR if deleted else 0)
        return deleted

    async def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        await asyncio.to_thread(self._shut)

    def _shut(self) -> None:
        self.stop_reading()
        self._writer.close()
        self._lock.release()

    async def _transact(self, work: Callable[[SqlTransaction], T]) -> T:
        try:
            done: T = await self._writer.transact(work)
        except errors.StoreUnavailable:
            self._on_error()
            raise
        return done


class _SessionLock(Struct, frozen=True):
    session: postgresql.LockSession
    leadership: Leadership

    def release(self) -> None:
        self.leadership.end()
        self.session.close()


def _migrate(engine: sa.Engine) -> str:
    """Return the store's identity."""
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            postgresql.allow_long_statements(connection)
        revision.bring_to_head(connection)
        if engine.dialect.name == "postgresql":
            postgresql.analyze_unknown_tables(connection)
        identity: str | None = connection.execute(sa.select(schema.identity.c.id)).scalar()
        if identity is None:
            identity = uuid.uuid4().hex
            connection.execute(sa.insert(schema.identity).values(id=identity, readable_from=schema.READABLE_FROM))
    return identity


def _read_controls(transaction: Transaction) -> None:
    transaction.controls()


def _rewrite_controls(transaction: SqlTransaction) -> None:
    # A write proves that the store works. Delete first: SQLite skips unchanged rows.
    controls = transaction.controls()
    transaction.flushed_connection().execute(sa.delete(schema.controls))
    transaction.save_controls(controls)
