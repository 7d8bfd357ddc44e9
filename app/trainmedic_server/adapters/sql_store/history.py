"""Reading of the history in a few threads. No read waits for the writer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import TypeVar

import sqlalchemy as sa

from trainmedic_server import errors
from trainmedic_server.adapters.sql_store import (
    database,
    effects,
    history_cursor,
    history_search,
    mapping,
    queries,
    statements,
    tallies,
)
from trainmedic_server.adapters.sql_store.history_page import page_select, renamed_alerts
from trainmedic_server.adapters.sql_store.history_search import Place
from trainmedic_server.adapters.sql_store.reading import BoundedRead
from trainmedic_server.adapters.sql_store.schema import TimeColumn, events, identity
from trainmedic_server.domain.effect import EffectVerdict
from trainmedic_server.domain.run import Event, Run
from trainmedic_server.ports.store import ActFilter, History, HistoryFilter, RunRecord
from trainmedic_server.ports.tallies import PlaybookTally, TallySource

T = TypeVar("T")

_RUNS_PER_READ = 100  # of a stream

_EVENTS_PER_READ = 1000  # of `events_of_jobs`

_EVENTS_OF = sa.select(events).where(events.c.run_id == sa.bindparam("run")).order_by(events.c.seq)
_EVENTS_AFTER = (
    sa.select(events).where(events.c.seq > sa.bindparam("after")).order_by(events.c.seq).limit(sa.bindparam("limit"))
)
_LAST_SEQ = sa.select(sa.func.max(events.c.seq))


class SqlHistory(History, TallySource):
    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._threads = ThreadPoolExecutor(database.READERS, thread_name_prefix="run-store-reader")
        # A separate thread: a cancel request can take seconds, and the default threads have deliveries to read.
        self._canceller = ThreadPoolExecutor(1, thread_name_prefix="run-store-canceller")
        self._closed = False

    async def page(self, matching: HistoryFilter, limit: int, cursor: str | None) -> tuple[list[Run], str | None]:
        before = history_cursor.decode(cursor) if cursor is not None else None
        runs, place = await self._read(lambda connection: _page(connection, matching, limit, before))
        return runs, history_cursor.encode(*place) if place is not None else None

    async def stream(self, matching: HistoryFilter) -> AsyncIterator[Run]:
        place: Place | None = None
        while True:
            runs, place = await self._read(partial(_page, matching=matching, limit=_RUNS_PER_READ, before=place))
            for run in runs:
                yield run
            if place is None:
                return

    async def record(self, run_id: str) -> RunRecord | None:
        return await self._read(lambda connection: _record(connection, run_id))

    async def events_after(self, seq: int, limit: int, kinds: Collection[str] = ()) -> list[Event]:
        statement, values = _EVENTS_AFTER, {"after": seq, "limit": limit}
        if kinds:
            statement = statement.where(events.c.kind.in_(kinds))
        return await self._read(
            lambda connection: [mapping.event_of(row) for row in connection.execute(statement, values)]
        )

    async def events_of_jobs(
        self, kinds: Collection[str], since: datetime, until: datetime, limit: int, job: str | None = None
    ) -> list[Event]:
        newest_first: list[Event] = []
        before: tuple[datetime, int] | None = None
        while len(newest_first) < limit:
            page = await self._read(partial(_events_of_no_run, since=since, until=until, before=before))
            chosen = (event for event in page if event.kind in kinds and job in (None, event.data.get("job")))
            newest_first += itertools.islice(chosen, limit - len(newest_first))
            if len(page) < _EVENTS_PER_READ:
                break
            before = (page[-1].at, page[-1].seq or 0)
        return newest_first[::-1]

    async def acts_of_people(self, matching: ActFilter, before: int | None, limit: int) -> list[Event]:
        is_of_person = sa.text("actor <> 'trainmedic'")  # As in the partial index `ix_events_people`.
        statement = sa.select(events).where(is_of_person).order_by(events.c.seq.desc()).limit(limit)
        if before is not None:
            statement = statement.where(events.c.seq < before)
        if matching.actor is not None:
            statement = statement.where(events.c.actor == matching.actor)
        if matching.since is not None:
            statement = statement.where(events.c.at >= matching.since)
        if matching.until is not None:
            statement = statement.where(events.c.at < matching.until)
        return await self._read(lambda connection: [mapping.event_of(row) for row in connection.execute(statement)])

    async def last_seq(self) -> int:
        return await self._read(lambda connection: connection.execute(_LAST_SEQ).scalar() or 0)

    async def tally(self, since: datetime, until: datetime) -> dict[str, PlaybookTally]:
        return await self._read(lambda connection: tallies.tally(connection, since, until))

    async def effects_between(self, since: datetime, until: datetime, limit: int) -> dict[str, EffectVerdict]:
        return await self._read(lambda connection: tallies.effect_verdicts(connection, since, until, limit))

    async def identity(self) -> str:
        return await self._read(lambda connection: str(connection.execute(sa.select(identity.c.id)).scalar_one()))

    def stop_reading(self) -> None:
        self._closed = True
        self._threads.shutdown()
        self._canceller.shutdown(cancel_futures=True)
        self._engine.dispose()

    async def _read(self, work: Callable[[sa.Connection], T]) -> T:
        if self._closed:
            raise errors.StoreUnavailable("the run store is closed")
        reading, loop = BoundedRead(), asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self._answer, work, reading)
        except asyncio.CancelledError:
            # Nothing waits for it any more, and other reads need the thread.
            with contextlib.suppress(RuntimeError):  # The store was closed, and all reads have ended.
                self._canceller.submit(reading.cancel)
            raise

    def _answer(self, work: Callable[[sa.Connection], T], reading: BoundedRead) -> T:
        with (
            database.translated("the history could not be read"),
            self._engine.begin() as connection,
            reading.bounded(connection),
        ):
            return work(connection)


def _events_of_no_run(
    connection: sa.Connection, since: datetime, until: datetime, before: tuple[datetime, int] | None
) -> list[Event]:
    statement = (
        sa.select(events)
        .where(sa.text("run_id IS NULL"), events.c.at >= since, events.c.at < until)
        .order_by(events.c.at.desc(), events.c.seq.desc())
        .limit(_EVENTS_PER_READ)
    )
    if before is not None:
        at, seq = before
        last = sa.tuple_(sa.literal(at, TimeColumn), sa.literal(seq))
        statement = statement.where(sa.tuple_(events.c.at, events.c.seq) < last)
    return [mapping.event_of(row) for row in connection.execute(statement)]


def _page(
    connection: sa.Connection, matching: HistoryFilter, limit: int, before: Place | None
) -> tuple[list[Run], Place | None]:
    renamed = renamed_alerts(connection, matching)
    if history_search.is_needed(matching):
        rows, place = history_search.search(connection, matching, limit, before, renamed_names=renamed)
    else:
        more = list(connection.execute(page_select(matching, limit + 1, before, renamed)))
        rows = more[:limit]
        place = (rows[-1].created_at, rows[-1].id) if len(more) > limit else None
    read = queries.with_touched_nodes(connection, queries.with_steps(connection, rows))
    return queries.with_groups(connection, read), place


def _record(connection: sa.Connection, run_id: str) -> RunRecord | None:
    found = queries.with_touched_nodes(connection, queries.runs(connection, [run_id]))
    run = next(iter(queries.with_groups(connection, found)), None)
    if run is None:
        return None
    return RunRecord(
        run=run,
        alerts=tuple(queries.alerts_of(connection, [run.alerts_run_id]).get(run.alerts_run_id, ())),
        events=tuple(mapping.event_of(row) for row in connection.execute(_EVENTS_OF, {"run": run_id})),
        orders=tuple(queries.orders_of(connection, [run_id]).get(run_id, ())),
        effect=next(map(effects.effect_of, connection.execute(effects.of_run(run_id))), None),
        members=tuple(connection.execute(statements.GROUP_LIST, {"parent": run_id}).scalar() or ()),
    )
