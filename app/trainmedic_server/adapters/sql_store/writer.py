"""The only writing thread, which commits all waiting units of work together. Each unit still fails alone.

With a `Leadership`, the connection is the session with the lock, regularly confirmed and never replaced.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy import exc

from trainmedic_server import errors, telemetry
from trainmedic_server.adapters.sql_store import database
from trainmedic_server.adapters.sql_store.leadership import Leadership, now
from trainmedic_server.adapters.sql_store.pending_writes import Flusher, PendingWrites
from trainmedic_server.adapters.sql_store.postgresql import HAS_LOCK
from trainmedic_server.adapters.sql_store.transaction import SharedWritesRefused, SqlTransaction, send_shared
from trainmedic_server.adapters.sql_store.writer_cache import WriterCache
from trainmedic_server.ports.fence import Fence, no_fence

log = telemetry.logger(__name__)

_MOST_UNITS = 500  # In one transaction, so that its units do not wait for all of a long queue.


class UnitOfWork(Struct, eq=False):
    work: Callable[[SqlTransaction], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop  # the caller's, in which `future` gets the outcome
    result: Any = None
    error: BaseException | None = None


class Committer:
    """Only writer of the database, so it may cache data for its next transaction.

    `require` raises StoreUnavailable before a transaction that would be lost.
    """

    def __init__(
        self,
        engine: sa.Engine,
        leadership: Leadership | None = None,
        flusher: Flusher | None = None,
        require: Fence = no_fence,
    ) -> None:
        self._engine = engine
        self._leadership = leadership
        self._require = require if leadership is None else leadership.require
        # After an error PostgreSQL refuses the rest of the transaction, unless it is rolled back to a savepoint.
        self._errors_spread = engine.dialect.name == "postgresql"
        self._flush = flusher or Flusher(engine.dialect)
        self._cache = WriterCache()
        self._connection: sa.Connection | None = None
        self.failing = False  # True from a failed commit until one with writes succeeds.

    def commit(self, units: list[UnitOfWork]) -> None:
        try:
            self._require()
            if self._transaction(self._connected(), units):
                self.failing = False
        except Exception as error:  # Whatever the error, the units failed, not the thread.
            self._reset_connection()
            if not isinstance(error, (exc.SQLAlchemyError, OSError, errors.TrainmedicError)):
                log.exception("run store failed unexpectedly")
            elif not self.failing:
                log.error("run store failed", error=str(database.unavailable("the run store", error)))
            self.failing = True
            for unit in units:
                unit.result, unit.error = None, database.unavailable("the run store could not commit", error)
                unit.error.__cause__ = error

    def _connected(self) -> sa.Connection:
        if self._connection is None:
            self._connection = self._engine.connect()
        return self._connection

    def confirm(self, leadership: Leadership) -> None:
        """Check that the session still has the lock: a pooler may have switched it."""
        asked_at = now()
        try:
            connection = self._connected()
            with connection.begin():
                has_lock = connection.exec_driver_sql(HAS_LOCK).scalar()
        except Exception as error:  # Whatever the error, the session is unreliable.
            leadership.lose(str(database.unavailable("the session with PostgreSQL failed", error)))
            return
        if has_lock:
            leadership.confirm(asked_at)
        else:
            leadership.lose("the lock belongs to another session; is there a connection pooler?")

    def _transaction(self, connection: sa.Connection, units: list[UnitOfWork]) -> bool:
        """Return whether anything may have been written."""
        try:
            with connection.begin():
                return self._run(connection, units, together=True)
        except SharedWritesRefused:
            self._cache.forget()
            with connection.begin():
                return self._run(connection, units, together=False)

    def _run(self, connection: sa.Connection, units: list[UnitOfWork], *, together: bool) -> bool:
        shared, wrote = PendingWrites(), False
        guarded = self._errors_spread and not together
        for unit in units:
            transaction = SqlTransaction(connection, self._flush, self._cache, shared, guarded=guarded)
            unit.result = unit.error = None
            try:
                unit.result = unit.work(transaction)
                wrote = transaction.may_have_written or wrote
                transaction.finish(flush=not together)
            except SharedWritesRefused:
                raise
            except BaseException as error:  # The unit's own error goes to its caller.
                if database.is_outage(error):
                    raise
                # The error has spoiled the whole transaction, so all units must run again.
                if self._errors_spread and isinstance(error, exc.DBAPIError) and not transaction.is_guarded:
                    raise SharedWritesRefused from error
                transaction.roll_back()
                unit.result, unit.error = None, _error_for_caller(error)
        send_shared(connection, self._flush, shared)
        return wrote

    def _reset_connection(self) -> None:
        if self._leadership is None:
            self.disconnect()
            return
        self._cache.forget()
        self.confirm(self._leadership)

    def disconnect(self) -> None:
        self._cache.forget()
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except exc.SQLAlchemyError as error:
                log.warning("run store connection did not close", error=str(error))


class StoreWriter:
    def __init__(self, committer: Committer, leadership: Leadership | None = None) -> None:
        self._committer = committer
        self._leadership = leadership
        self._queue: queue.SimpleQueue[UnitOfWork | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._closed = False
        # A daemon: an exit without close() is no worse than a crash, which the store survives.
        self._thread = threading.Thread(target=self._work, name="run-store-writer", daemon=True)
        self._thread.start()

    @property
    def failing(self) -> bool:
        return self._committer.failing

    async def transact(self, work: Callable[[SqlTransaction], Any]) -> Any:
        loop = asyncio.get_running_loop()
        unit = UnitOfWork(work, loop.create_future(), loop)
        with self._gate:
            if self._closed:
                raise errors.StoreUnavailable("the run store is closed")
            self._queue.put(unit)
        return await unit.future

    def close(self) -> None:
        with self._gate:
            first, self._closed = not self._closed, True
            if first:
                self._queue.put(None)
        self._thread.join()  # after it has committed what was queued

    def _work(self) -> None:
        ended = False
        while not ended:
            units: list[UnitOfWork] = []
            if self._leadership is not None and self._leadership.is_confirmation_due:
                self._committer.confirm(self._leadership)
            try:
                unit = self._queue.get(timeout=self._leadership.heartbeat if self._leadership else None)
            except queue.Empty:
                continue
            while unit is not None:
                units.append(unit)
                if len(units) == _MOST_UNITS or self._queue.empty():
                    break
                unit = self._queue.get()
            ended = unit is None
            units = [unit for unit in units if not unit.future.cancelled()]
            if units:
                self._committer.commit(units)
                _resolve(units)
        self._committer.disconnect()


def _error_for_caller(error: BaseException) -> BaseException:
    if isinstance(error, StopIteration):  # A future does not accept it.
        stopped = RuntimeError("a unit of work raised StopIteration")
        stopped.__cause__ = error
        return stopped
    if isinstance(error, exc.IntegrityError):
        conflict = errors.Conflict(f"the run store refused a change: {error.orig}")
        conflict.__cause__ = error
        return conflict
    return error


def _resolve(units: list[UnitOfWork]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[UnitOfWork]] = {}
    for unit in units:
        by_loop.setdefault(unit.loop, []).append(unit)
    for loop, its_units in by_loop.items():
        try:
            loop.call_soon_threadsafe(_set_outcomes, its_units)
        except RuntimeError:  # The loop is closed, so nothing waits.
            log.warning("caller of a unit of work left before its result", units=len(its_units))


def _set_outcomes(units: list[UnitOfWork]) -> None:
    for unit in units:
        if unit.future.done():
            continue
        if unit.error is not None:
            unit.future.set_exception(unit.error)
        else:
            unit.future.set_result(unit.result)
