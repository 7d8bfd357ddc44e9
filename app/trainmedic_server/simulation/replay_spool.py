"""Temporary file of a replay, which sorts recorded alerts by time in bounded memory."""

from __future__ import annotations

import itertools
import sqlite3
import tempfile
from collections.abc import Iterator
from datetime import datetime
from types import TracebackType

import msgspec
from msgspec import Struct

from trainmedic_core.target import Target
from trainmedic_server.adapters.sql_store.history_cursor import microseconds_of
from trainmedic_server.simulation.recorded import RecordedReaction, RecordedRun

_BATCH = 1000  # rows written at once


class SpooledCandidate(Struct, frozen=True, array_like=True):
    playbook: str
    target: Target | None
    decision: str = ""
    """Reason for no target (`domain.run.Decision`); empty if there is one."""
    why: str = ""


class SpooledAlert(Struct, frozen=True, array_like=True):
    """The parts of a recorded alert that its replay needs."""

    name: str
    fingerprint: str
    starts_at: datetime
    first_heard: datetime
    last_heard: datetime
    count: int
    resolved_at: datetime | None
    candidates: tuple[SpooledCandidate, ...]
    reactions: tuple[RecordedReaction, ...]
    """Excludes playbooks that did not match."""
    misses: dict[str, str]
    """Reasons why playbooks that decided then do not match now."""


class ReplaySpool:
    """Use as a context manager, which deletes the file."""

    def __enter__(self) -> ReplaySpool:
        self._folder = tempfile.TemporaryDirectory(prefix="trainmedic-replay-")
        self._database = sqlite3.connect(f"{self._folder.name}/spool.sqlite", isolation_level=None)
        for statement in (
            "PRAGMA journal_mode = OFF",
            "PRAGMA synchronous = OFF",
            "CREATE TABLE alerts (at INTEGER, fingerprint TEXT, starts_at INTEGER, times INTEGER, data BLOB)",
            "CREATE TABLE runs (id TEXT PRIMARY KEY, at INTEGER, by_person INTEGER, data BLOB) WITHOUT ROWID",
            "BEGIN",
        ):
            self._database.execute(statement)
        self._alerts: list[tuple[object, ...]] = []
        self._runs: list[tuple[object, ...]] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._run_decoder = msgspec.msgpack.Decoder(RecordedRun)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()
        self._folder.cleanup()

    def add_alert(self, alert: SpooledAlert) -> None:
        row = (microseconds_of(alert.first_heard), alert.fingerprint, microseconds_of(alert.starts_at), alert.count)
        self._alerts.append((*row, self._encoder.encode(alert)))
        if len(self._alerts) >= _BATCH:
            self._write()

    def add_run(self, run: RecordedRun) -> None:
        row = run.run_id, microseconds_of(run.timestamp), run.started_by is not None
        self._runs.append((*row, self._encoder.encode(run)))
        if len(self._runs) >= _BATCH:
            self._write()

    def _write(self) -> None:
        if not (self._alerts or self._runs):
            return
        self._database.executemany("INSERT INTO alerts VALUES (?, ?, ?, ?, ?)", self._alerts)
        # A later copy of a run is its newer state.
        self._database.executemany("INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?)", self._runs)
        self._alerts.clear()
        self._runs.clear()

    def alerts(self) -> Iterator[SpooledAlert]:
        """Yield each alert once, by the time of its first report; the newest of several copies."""
        self._write()
        decoder = msgspec.msgpack.Decoder(SpooledAlert)
        rows = self._database.execute(
            "SELECT at, fingerprint, starts_at, data FROM alerts ORDER BY at, fingerprint, starts_at, times DESC"
        )
        for _, copies in itertools.groupby(rows, key=lambda row: row[:3]):
            yield decoder.decode(next(copies)[3])

    def run(self, run_id: str) -> RecordedRun | None:
        self._write()
        row = self._database.execute("SELECT data FROM runs WHERE id = ?", (run_id,)).fetchone()
        return self._run_decoder.decode(row[0]) if row else None

    def runs(self) -> Iterator[RecordedRun]:
        """Yield all recorded runs, without order."""
        self._write()
        return map(self._decoded, self._database.execute("SELECT data FROM runs"))

    def given_runs(self, before: datetime) -> Iterator[RecordedRun]:
        """Yield, by time, runs that people started and those from before this time."""
        self._write()
        chosen = "SELECT data FROM runs WHERE by_person OR at < ? ORDER BY at, id"
        return map(self._decoded, self._database.execute(chosen, (microseconds_of(before),)))

    def _decoded(self, row: tuple[bytes]) -> RecordedRun:
        return self._run_decoder.decode(row[0])
