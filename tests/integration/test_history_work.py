"""What a long history costs, counted: reading it in instructions of SQLite, which stay the same however slow the disk
is, and deleting it in what others have to read again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from msgspec.structs import replace

from tests.contract.run_store_values import at, closed, gpu
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.adapters.sql_store import database, history_search, prune, tallies
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.domain.run import OperatorOrder, OrderKind, Run
from trainmedic_server.ports.store import HistoryFilter, Transaction
from trainmedic_server.ports.tallies import PlaybookTally

HOUR = 60
JOB = Target(TargetKind.JOB, job="llm")
COUNT_EVERY = 10
"""Instructions."""


class Counted:
    """Searches a store, and counts what they cost."""

    def __init__(self, url: str) -> None:
        self._engine = database.reader_engine(sa.make_url(url), timedelta(seconds=5))
        self.instructions = 0

    def first_page(self, wanted: HistoryFilter, seconds: float) -> tuple[list[str], bool]:
        """The runs' ids, and whether there may be more; a second is a thousand instructions."""
        with self._counting() as connection, pytest.MonkeyPatch.context() as patch:
            patch.setattr(history_search, "SECONDS", seconds)
            rows, place = history_search.search(connection, wanted, 10, None, lambda: self.instructions / 1000)
        return [row.id for row in rows], place is not None

    def tally(self, since: datetime, until: datetime) -> dict[str, PlaybookTally]:
        with self._counting() as connection:
            return tallies.tally(connection, since, until)

    @contextmanager
    def _counting(self) -> Iterator[sa.Connection]:
        def count() -> None:
            self.instructions += COUNT_EVERY

        self.instructions = 0
        with self._engine.begin() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            driver.set_progress_handler(count, COUNT_EVERY)
            yield connection
            driver.set_progress_handler(None, 0)

    def close(self) -> None:
        self._engine.dispose()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/runs.db"


@pytest.fixture
def counted(url: str) -> Iterator[Counted]:
    counted = Counted(url)
    yield counted
    counted.close()


async def fill(url: str, runs: list[Run]) -> None:
    """Each run touches the node ``n`` and has an order of ann's."""

    def work(tx: Transaction) -> None:
        tx.add_runs(runs)
        for run in runs:
            tx.touch_nodes(run.id, ["n"], run.created_at)
            tx.add_order(OperatorOrder(f"order-{run.id}", run.id, OrderKind.APPROVE, "ann", run.created_at))

    store = SqlStore.open(url)
    await store.transact(work)
    await store.close()


@pytest.mark.parametrize("wanted", [HistoryFilter(node="n"), HistoryFilter(by="ann")], ids=["node", "by"])
async def test_old_history_does_not_slow_down_recent_searches(
    url: str, counted: Counted, wanted: HistoryFilter
) -> None:
    """Searches by node and by actor are limited to the period searched: 2,000 runs before it are
    passed over."""
    wanted = replace(wanted, alertname="never")
    newest = 90 * 24 * HOUR
    await fill(url, [closed(newest - number, JOB) for number in range(5)])
    assert counted.first_page(wanted, -1.0) == ([], False)
    few = counted.instructions
    await fill(url, [closed(number / 10, JOB) for number in range(2_000)])
    assert counted.first_page(wanted, -1.0) == ([], True)
    assert counted.instructions < 1.5 * few


async def test_a_page_stays_within_its_time_limit(url: str, counted: Counted) -> None:
    """Two filters never match together: each part of the search gets the time that is left, not twice that."""
    runs = [closed(number * 10, JOB if number % 2 else gpu(0, "m")) for number in range(4_000)]
    await fill(url, [replace(run, alert_name="a" if run.target == JOB else "b") for run in runs])
    for seconds in (3, 7, 15):
        ids, is_more = counted.first_page(HistoryFilter(alertname="a", gpu="0"), seconds)
        assert (ids, is_more) == ([], True)
        assert seconds * 1000 <= counted.instructions < seconds * 1400


async def test_the_newest_runs_of_a_node_are_found_without_reading_its_others(url: str, counted: Counted) -> None:
    """A page of a node costs a few pages' worth of runs, not all that ever touched the node."""
    runs = [closed(number * HOUR, JOB) for number in range(2_000)]
    await fill(url, runs)
    ids, is_more = counted.first_page(HistoryFilter(node="n", since=at(0)), 1e9)
    assert (ids, is_more) == ([run.id for run in runs[-1:-11:-1]], True)
    assert counted.instructions < 10_000


async def test_a_part_of_a_day_is_counted_once(url: str, counted: Counted) -> None:
    """The number of playbooks does not multiply the cost of adding up its runs."""
    costs = {}
    for playbooks, day in ((1, 0), (40, 2)):
        first = day * 24 * HOUR + 5
        names = [f"playbook-{number % playbooks}" for number in range(1_200)]
        await fill(url, [closed(first + number, JOB, playbook=name) for number, name in enumerate(names)])
        await fill(url, [closed(first + 24 * HOUR, JOB)])
        came_to = counted.tally(at(first), at(first + 1_200))
        assert sum(came_to["playbook-0"].repair_seconds.values()) == 1_200 // playbooks
        costs[playbooks] = counted.instructions
    assert costs[40] < 1.5 * costs[1]


async def test_deleting_old_runs_keeps_the_writers_cache(url: str) -> None:
    """Concurrent deliveries would reread all nodes and open runs for every fifty deleted runs."""
    statements: list[str] = []

    def ask(tx: Transaction) -> None:
        tx.open_runs_for([("cool", "cluster")])
        tx.nodes_acted_on(at(99))
        tx.known_nodes()

    await fill(url, [closed(number / 1000, JOB) for number in range(120)])
    store = SqlStore.open(url)
    await store.transact(lambda tx: tx.remember_nodes(["here"], at(90)))
    await store.transact(ask)
    await store.transact(lambda tx: tx._connection.connection.set_trace_callback(statements.append))  # type: ignore[attr-defined]
    for _ in range(2):
        assert await store.transact(lambda tx: prune.delete_runs_before(tx, at(50))) == prune.BATCH
    assert any(statement.startswith("DELETE FROM runs") for statement in statements)
    statements.clear()
    await store.transact(ask)
    await store.close()
    assert not [statement for statement in statements if statement.startswith("SELECT")]
