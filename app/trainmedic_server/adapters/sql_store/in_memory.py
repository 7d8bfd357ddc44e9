"""Run store in memory for the simulation and unit tests. It lacks only durability.

Units run immediately in the caller, so that virtual time never waits.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import sqlalchemy as sa

from trainmedic_server import errors
from trainmedic_server.adapters.sql_store import database, schema
from trainmedic_server.adapters.sql_store.pending_writes import Flusher
from trainmedic_server.adapters.sql_store.reading import BoundedRead
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.adapters.sql_store.transaction import SqlTransaction
from trainmedic_server.adapters.sql_store.writer import Committer, UnitOfWork

T = TypeVar("T")


class _ImmediateWriter:  # a `UnitRunner`
    def __init__(self, committer: Committer) -> None:
        self._committer = committer
        self._closed = False

    @property
    def failing(self) -> bool:
        return self._committer.failing

    async def transact(self, work: Callable[[SqlTransaction], Any]) -> Any:
        if self._closed:
            raise errors.StoreUnavailable("the run store is closed")
        loop = asyncio.get_running_loop()
        unit = UnitOfWork(work, loop.create_future(), loop)
        self._committer.commit([unit])
        if unit.error is not None:
            raise unit.error
        return unit.result

    def close(self) -> None:
        self._closed = True


class _NoLock:
    def release(self) -> None:
        pass


class InMemoryStore(SqlStore):
    def __init__(self) -> None:
        engine = database.memory_engine()
        _load(engine, _empty_database())
        committer = Committer(engine, flusher=_flusher())
        super().__init__(_ImmediateWriter(committer), engine, _NoLock(), lambda: None)
        weakref.finalize(self, engine.dispose)

    async def _read(self, work: Callable[[sa.Connection], T]) -> T:
        if self._closed:
            raise errors.StoreUnavailable("the run store is closed")
        return self._answer(work, BoundedRead())


@cache
def _flusher() -> Flusher:
    return Flusher(database.memory_engine().dialect)


@cache
def _empty_database() -> bytes:
    engine = database.memory_engine()
    schema.metadata.create_all(engine)
    with engine.connect() as connection:
        written: bytes = _driver_connection(connection).serialize()
    engine.dispose()
    return written


def _load(engine: sa.Engine, written: bytes) -> None:
    with engine.connect() as connection:
        # An open transaction would prevent SQLite from replacing the database.
        connection.rollback()
        _driver_connection(connection).deserialize(written)


def _driver_connection(connection: sa.Connection) -> Any:
    return connection.connection.driver_connection
