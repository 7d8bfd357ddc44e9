"""A run store with many runs: size, start, pages and filters, and deliveries during deletion or export.

    PYTHONPATH=.:app:sdk python benchmarks/history_store.py [--runs 1000000] [--database URL] [--delete 20000]
        [--keep DIRECTORY] [--at-most MINUTES]

The store is filled by SQL (``past_rows``): in a temporary directory with 4 KB of room for each run, in one that is kept
for the next time, or in an empty PostgreSQL database. Pages of a file are read cold and warm. An export as CSV in the
server's process, deletion, and deletion after archiving run next to single matched deliveries' transactions, fifty a
second; their times are printed with each and without.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import cast

import psycopg
import sqlalchemy as sa

from benchmarks import past_rows
from benchmarks.history_page import _for_speed, made
from tests.support.programs import start_server
from trainmedic_server.adapters.gzip_archive import GzipArchive
from trainmedic_server.adapters.sql_store import database, postgresql, schema
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.api import views
from trainmedic_server.api.exports import CSV, Exports
from trainmedic_server.domain.alert import Alert, AlertRecord, AlertStatus
from trainmedic_server.http.limits import ServerLimits
from trainmedic_server.http.streaming import StreamedResponse
from trainmedic_server.ports.archive import RunArchive
from trainmedic_server.ports.store import HistoryFilter, Transaction

FILTERS = {
    "none": HistoryFilter(),
    "alertname": HistoryFilter(alertname="GPUAlert3"),
    "playbook": HistoryFilter(playbook="playbook-3"),
    "status": HistoryFilter(status="failed"),
    "decision": HistoryFilter(decision="cooldown"),
    "node": HistoryFilter(node="node-3"),
    "gpu": HistoryFilter(gpu="GPU-2"),
    "job": HistoryFilter(job="job-8"),
    "alertname and status": HistoryFilter(alertname="GPUAlert3", status="failed"),
    "alertname and node, never together": HistoryFilter(alertname=past_rows.NEVER_MET[0], node=past_rows.NEVER_MET[1]),
    "playbook and status, never together": HistoryFilter(playbook="playbook-3", status="not_started"),
}
PAUSE = 0.02
DELIVERIES = 500
NUMBERS = itertools.count(10_000_000)
MOST_PARTS = 20
"""Pages of one search; in a very long history, conditions that never meet take hundreds."""


class Measured:
    """A filled store, which can be made cold."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._file = database.file_of(database.parse(url)) if not postgresql.is_postgresql(url) else None

    def fill(self, count: int) -> None:
        asyncio.run(SqlStore.open(self.url).close())
        if self._file is None:
            engine = sa.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(self.url))
        else:
            engine = database.writer_engine(sa.make_url(self.url), timedelta(seconds=5))
            sa.event.listen(engine, "connect", _for_speed)
        began = time.perf_counter()
        with engine.connect() as connection:
            past_rows.fill(connection, count, int(time.time() * 1e6))
            size = self._size(connection)
        engine.dispose()
        seconds = time.perf_counter() - began
        print(f"{count:,} runs stored in {seconds:.0f} s; {size / count:.0f} bytes for each", flush=True)

    def _size(self, connection: sa.Connection) -> int:
        if self._file is not None:
            return self._file.stat().st_size
        return int(connection.exec_driver_sql("SELECT pg_database_size(current_database())").scalar_one())

    def cool(self) -> None:
        """Have the system forget the file, except PostgreSQL's."""
        for path in (self._file, Path(f"{self._file}-wal")) if self._file is not None else ():
            if path.exists():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def pages(measured: Measured, store: SqlStore) -> None:
    """Print the first page for each filter, cold and the median of five warm ones, and the number of pages."""
    for title, matching in FILTERS.items():
        measured.cool()
        cold = await timed(lambda matching=matching: store.page(matching, 100, None))
        warm = [await timed(lambda matching=matching: store.page(matching, 100, None)) for _ in range(5)]
        items, cursor, parts = 0, None, 0
        while items < 100 and parts < MOST_PARTS and (parts == 0 or cursor is not None):
            runs, cursor = await store.page(matching, 100, cursor)
            items, parts = items + len(runs), parts + 1
        text = f"first page by {title}: {cold * 1000:.0f} ms cold, {statistics.median(warm) * 1000:.1f} ms warm"
        rest = ", and more to search" if items < 100 and cursor is not None else ""
        print(f"{text}; {items} found in {parts} pages{rest}", flush=True)


async def tallies(store: SqlStore) -> None:
    now = datetime.now(UTC)
    midnight = datetime.combine(now.date(), datetime.min.time(), UTC)
    for title, since in (("30 whole days and today", midnight), ("30 days to the second", now)):
        seconds = await timed(lambda since=since: store.tally(since - timedelta(days=30), now))
        print(f"what the playbooks came to in {title}: {seconds * 1000:.1f} ms", flush=True)


async def delivered(store: SqlStore) -> None:
    """Write a delivery of one matched alert, in mode observe."""
    run = made(next(NUMBERS))
    alert = Alert(run.alert.fingerprint, AlertStatus.FIRING, run.alert_labels, {}, run.alert.starts_at)

    def work(tx: Transaction) -> None:
        tx.alerts([run.alert])
        tx.save_alerts([AlertRecord(alert, run.created_at, run.created_at)])
        tx.add_runs([run])

    await store.transact(work)


async def percentiles(store: SqlStore, beside: asyncio.Task[int] | None = None) -> str:
    """Return the percentiles of at least `DELIVERIES` deliveries, continued until `beside` is done."""
    times = []
    while len(times) < DELIVERIES or (beside is not None and not beside.done()):
        times.append(await timed(lambda: delivered(store)))
        await asyncio.sleep(PAUSE)
    times.sort()
    count = len(times)
    p50, p99, worst = (times[place] * 1000 for place in (count // 2, count * 99 // 100, -1))
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, worst {worst:.0f} ms, of {count:,}"


async def export(store: SqlStore) -> None:
    """Measure deliveries during repeated exports, and print the exported number."""
    exports, runs = Exports(ServerLimits(), views.HistoryItem, views.item), 0

    async def exported() -> None:
        nonlocal runs
        while True:
            response = await exports.response(store.stream(HistoryFilter()), CSV)
            async for chunk in cast(StreamedResponse, response)._chunks:
                runs += chunk.count(b"\n")
                await asyncio.sleep(0)

    alone = await percentiles(store)
    reading, began = asyncio.create_task(exported()), time.perf_counter()
    beside = await percentiles(store)
    speed = runs / (time.perf_counter() - began)
    reading.cancel()
    await asyncio.wait([reading])
    print(f"deliveries alone: {alone}")
    print(f"deliveries beside an export of {speed:,.0f} runs a second: {beside}", flush=True)


async def deletion(store: SqlStore, before: datetime, archive: RunArchive | None, at_most: timedelta) -> None:
    """Measure deliveries during the deletion of older runs."""

    async def pruned() -> int:
        there = await store._read(partial(delete_runs_before, before=before))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most.total_seconds()):
                await store.prune(before, archive)
        return there - int(await store._read(partial(delete_runs_before, before=before)))

    pruning, began = asyncio.create_task(pruned()), time.perf_counter()
    beside = await percentiles(store, pruning)
    gone, seconds = await pruning, time.perf_counter() - began
    title = "deletion" if archive is None else "archiving and deletion"
    print(f"deliveries beside the {title} of {gone:,} runs in {seconds:.0f} s: {beside}", flush=True)


def delete_runs_before(connection: sa.Connection, before: datetime) -> int:
    older = sa.select(sa.func.count()).select_from(schema.runs).where(schema.runs.c.created_at < before)
    return int(connection.execute(older).scalar_one())


async def deletions(store: SqlStore, count: int, delete: int, archive: RunArchive, at_most: timedelta) -> None:
    print(f"deliveries alone: {await percentiles(store)}", flush=True)
    now = datetime.now(UTC)
    for turn, kept in enumerate((None, archive), start=1):
        before = now - timedelta(seconds=(count - turn * delete) * past_rows.SECONDS_APART)
        await deletion(store, before, kept, at_most)


def start(directory: Path, url: str) -> None:
    """Print the seconds from a server's start to its first 200 on ``/ready``."""
    began = time.perf_counter()
    server, _ = start_server(directory, "--database", url, "--retention", "36500d")
    with server:
        print(f"a server was ready after {time.perf_counter() - began:.2f} s", flush=True)


async def measure(measured: Measured, count: int, delete: int, archive: RunArchive, at_most: timedelta) -> None:
    measured.cool()
    began = time.perf_counter()
    store = SqlStore.open(measured.url)
    print(f"opened in {(time.perf_counter() - began) * 1000:.0f} ms", flush=True)
    await pages(measured, store)
    await tallies(store)
    await export(store)
    await deletions(store, count, delete, archive, at_most)
    await store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--delete", type=int, default=20_000, help="the oldest runs: deleted at the end, as many twice")
    parser.add_argument("--database", metavar="URL", help="an empty PostgreSQL database, instead of a file")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="where the file is, or is made and stays")
    parser.add_argument("--at-most", type=float, default=40, metavar="MINUTES", help="that each deletion may take")
    options = parser.parse_args()
    with ExitStack() as stack:
        directory = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        measured = Measured(options.database or f"sqlite:///{directory}/runs.db")
        if options.database or not (directory / "runs.db").exists():
            measured.fill(options.runs)
        with tempfile.TemporaryDirectory() as work:
            measured.cool()
            start(Path(work), measured.url)
            archive = GzipArchive(Path(work) / "archive")
            archive.prepare()
            asyncio.run(measure(measured, options.runs, options.delete, archive, timedelta(minutes=options.at_most)))


if __name__ == "__main__":
    main()
