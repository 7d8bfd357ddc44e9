"""First page of the history with 1,000,000 runs, over the same with 1,000.

    PYTHONPATH=.:app:sdk python benchmarks/history_page.py [--runs 1000000]

For each filter and none it prints the median time of `History.page` (100 items) in both stores, and their ratio. The
aim is 1.5. Both stores are filled by the same bulk inserts, and each filter's page is full in both.
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import sqlalchemy as sa

from trainmedic.wire.envelope import new_id
from trainmedic_core.target import Target, TargetKind
from trainmedic_server.adapters.sql_store import database
from trainmedic_server.adapters.sql_store.pending_writes import Flusher, PendingWrites
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.domain.alert import Identity
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.domain.run import Decision, Run, Status, StepState, StepStatus
from trainmedic_server.ports.store import HistoryFilter

LIMIT = 100
ROUNDS = 60
BATCH = 5000
START = datetime(2026, 1, 1, tzinfo=UTC)
NAMES = ("GPUTemperatureHigh", "TrainingLossSpike", "GPUMemoryUsageHigh", "DiskSpaceLow")
OUTCOMES = (
    (Status.SUCCEEDED, Decision.STARTED),
    (Status.FAILED, Decision.STARTED),
    (Status.OBSERVED, Decision.OBSERVE_ONLY),
    (Status.NOT_STARTED, Decision.COOLDOWN),
    (Status.SUCCEEDED, Decision.STARTED),
)

FILTERS = {
    "none": HistoryFilter(),
    "alertname": HistoryFilter(alertname=NAMES[0]),
    "playbook": HistoryFilter(playbook="playbook-1"),
    "status": HistoryFilter(status="failed"),
    "decision": HistoryFilter(decision="cooldown"),
    "node": HistoryFilter(node="node-3"),
    "gpu": HistoryFilter(gpu="GPU-2"),
    "job": HistoryFilter(job="job-2"),
    "since": HistoryFilter(since=START + timedelta(seconds=300)),
    "until": HistoryFilter(until=START + timedelta(seconds=800)),
}


def made(number: int) -> Run:
    """Return the run of this number, one per second."""
    status, decision = OUTCOMES[number % len(OUTCOMES)]
    created_at = START + timedelta(seconds=number)
    name = NAMES[number % len(NAMES)]
    if number % 3 == 0:
        target = Target(TargetKind.JOB, job=f"job-{number // 3 % 3}")
    else:
        target = Target(TargetKind.GPU, node=f"node-{number % 4}", gpu=f"GPU-{number % 5}")
    return Run(
        id=new_id(int(created_at.timestamp() * 1000)),
        playbook=f"playbook-{number % 6}",
        version="1",
        target=target,
        mode=Mode.ENFORCE,
        status=status,
        decision=decision,
        alert=Identity(f"{number:016x}", created_at),
        alert_name=name,
        alert_labels={"alertname": name, "severity": "critical", "instance": f"10.0.0.{number % 250}:9400"},
        created_at=created_at,
        ended_at=created_at,
        steps=(StepState("steps", 0, "cap", "action", "gpu.power_limit", StepStatus.SUCCEEDED, {"percent": 80}),),
    )


def batches(count: int) -> Iterator[PendingWrites]:
    for first in range(0, count, BATCH):
        pending = PendingWrites()
        for number in range(first, min(first + BATCH, count)):
            pending.add_run(made(number))
        yield pending


async def filled(directory: Path, count: int) -> SqlStore:
    """Return a store with `count` runs, inserted directly for speed."""
    url = f"sqlite:///{directory}/{count}.db"
    await SqlStore.open(url).close()
    began = time.perf_counter()
    engine = database.writer_engine(sa.make_url(url), timedelta(seconds=5))
    flush = Flusher(engine.dialect)
    sa.event.listen(engine, "connect", _for_speed)
    with engine.connect() as connection:
        for pending in batches(count):
            with connection.begin():
                flush(connection, pending)
    print(f"{count:>9,} runs stored in {time.perf_counter() - began:.0f} s", flush=True)
    return SqlStore.open(url)


def _for_speed(connection: sqlite3.Connection, record: object) -> None:
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA cache_size = -1000000")


async def times(small: SqlStore, large: SqlStore, wanted: HistoryFilter) -> tuple[float, float]:
    """Return a page's median seconds in each store, measured in turns."""
    taken: tuple[list[float], list[float]] = ([], [])
    for turn in range(ROUNDS + 5):
        for store, found in zip((small, large), taken, strict=True):
            began = time.perf_counter()
            items, _ = await store.page(wanted, LIMIT, None)
            if turn >= 5:
                found.append(time.perf_counter() - began)
            if len(items) < LIMIT:
                raise SystemExit(f"the page of {wanted} is not full")
    return statistics.median(taken[0]), statistics.median(taken[1])


async def measure(count: int) -> float:
    """Print a line for each filter, and return the largest ratio."""
    with tempfile.TemporaryDirectory() as name:
        small, large = await filled(Path(name), 1000), await filled(Path(name), count)
        ratios = []
        for title, wanted in FILTERS.items():
            few, many = await times(small, large, wanted)
            ratios.append(many / few)
            print(f"{title:>10}: {many * 1000:6.2f} ms / {few * 1000:6.2f} ms = {many / few:.2f}", flush=True)
        await small.close()
        await large.close()
    return max(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1_000_000, help="runs in the large store")
    count = parser.parse_args().runs
    worst = asyncio.run(measure(count))
    print(f"first page with {count:,} runs / with 1,000 runs, worst filter: {worst:.2f} (aim: 1.5 or less)")


if __name__ == "__main__":
    main()
