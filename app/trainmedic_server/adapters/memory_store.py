"""A run store in memory: for playbook tests and unit tests, where nothing has to outlive the process.

It keeps every promise of the ports but durability; the contract suite runs on it as on the SQL
store. Work runs at once, in the caller, with no thread and no wait; a unit that raises is taken
back from a journal of what it changed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import TypeVar

from trainmedic_server import errors
from trainmedic_server.adapters import history_cursor
from trainmedic_server.adapters.memory_tables import MemoryTables, MemoryTransaction
from trainmedic_server.domain.run import Event, Run
from trainmedic_server.ports.store import History, HistoryFilter, RunRecord, RunStore, Transaction

T = TypeVar("T")


class MemoryStore(RunStore, History):
    """`ports.RunStore` and `ports.History` over dictionaries."""

    def __init__(self) -> None:
        self._tables = MemoryTables()
        self._closed = False

    async def transact(self, work: Callable[[Transaction], T]) -> T:
        self._require_open()
        tables = self._tables
        tables.begin()
        try:
            done = work(MemoryTransaction(tables))
            tables.check_links()
        except BaseException:
            tables.roll_back()
            raise
        return done

    async def check(self) -> None:
        self._require_open()

    async def prune(self, older_than: datetime) -> int:
        self._require_open()
        return self._tables.prune(older_than)

    async def close(self) -> None:
        self._closed = True

    async def page(self, matching: HistoryFilter, limit: int, cursor: str | None) -> tuple[list[Run], str | None]:
        self._require_open()
        before = history_cursor.decode(cursor) if cursor is not None else None
        runs: list[Run] = []
        for run in self._tables.newest_first():
            if (before is None or (run.created_at, run.id) < before) and _matches(run, matching):
                if len(runs) == limit:
                    return runs, history_cursor.encode(runs[-1].created_at, runs[-1].id)
                runs.append(run)
        return runs, None

    async def stream(self, matching: HistoryFilter) -> AsyncIterator[Run]:
        self._require_open()
        for run in self._tables.newest_first():
            if _matches(run, matching):
                yield run

    async def record(self, run_id: str) -> RunRecord | None:
        self._require_open()
        run = self._tables.runs.get(run_id)
        if run is None:
            return None
        unit = MemoryTransaction(self._tables)
        return RunRecord(
            run=run,
            alerts=tuple(unit.alerts_of([run_id]).get(run_id, ())),
            events=tuple(event for event in self._tables.events if event.run_id == run_id),
            orders=tuple(unit.orders_of([run_id]).get(run_id, ())),
        )

    async def events_after(self, seq: int, limit: int) -> list[Event]:
        self._require_open()
        return [event for event in self._tables.events if event.seq is not None and event.seq > seq][:limit]

    async def last_seq(self) -> int:
        self._require_open()
        return self._tables.last_seq

    async def playbook_counts(self) -> dict[str, dict[str, int]]:
        self._require_open()
        counts: dict[str, dict[str, int]] = {}
        for run in self._tables.runs.values():
            of_playbook = counts.setdefault(run.playbook, {})
            of_playbook[run.status.value] = of_playbook.get(run.status.value, 0) + 1
        return counts

    def _require_open(self) -> None:
        if self._closed:
            raise errors.StoreUnavailable("the run store is closed")


def _matches(run: Run, matching: HistoryFilter) -> bool:
    target = run.target
    pairs = (
        (matching.alertname, run.alert_name),
        (matching.playbook, run.playbook),
        (matching.status, run.status),
        (matching.decision, run.decision),
        (matching.node, target and target.node),
        (matching.gpu, target and target.gpu),
        (matching.job, target and target.job),
    )
    return (
        all(expected is None or expected == actual for expected, actual in pairs)
        and (matching.since is None or run.created_at >= matching.since)
        and (matching.until is None or run.created_at < matching.until)
    )
