"""The run store under SIGKILL: what was acknowledged is there, whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.contract.run_store_values import event
from tests.support.programs import PYTHON_PATH
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.domain.run import Run, Status
from trainmedic_server.ports.store import HistoryFilter, Transaction

ROOT = Path(__file__).parents[2]

WRITER = """
import asyncio, sys
from msgspec.structs import replace
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.domain.run import Status
from tests.contract.run_store_values import at, event, gpu, heard, run

async def client(store, name):
    for number in range(1_000_000):
        one = run(number, gpu(name))
        record = heard(f"{name}-{number}")
        def admit(tx):
            tx.save_alerts([record])
            tx.add_runs([one])
            tx.link([(one.id, record.identity)])
            tx.append([event("started", one.id), event("acted", one.id)])
        await store.transact(admit)
        print("open", one.id, flush=True)
        done = replace(one, status=Status.SUCCEEDED, ended_at=at(number + 1))
        await store.transact(lambda tx: (tx.save_runs([(done, one)]), tx.append([event("ended", one.id)])))
        print("done", one.id, flush=True)

async def main():
    store = SqlStore.open(sys.argv[1])
    await asyncio.gather(*(client(store, name) for name in range(4)))

asyncio.run(main())
"""


@pytest.mark.parametrize("seed", range(4))
async def test_acknowledged_units_survive_a_kill(tmp_path: Path, seed: int) -> None:
    """Repeated kills at random moments: every acknowledged unit is kept, and no unit is stored in part."""
    url = f"sqlite:///{tmp_path}/trainmedic.db"
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    chance = random.Random(seed)
    opened: set[str] = set()
    done: set[str] = set()
    for _ in range(2):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, url], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        wanted = chance.randrange(1, 300)
        lines = [line for _, line in zip(range(wanted), writer.stdout, strict=False)]
        writer.send_signal(signal.SIGKILL)
        lines += writer.stdout.read().splitlines()
        writer.wait()
        writer.stdout.close()
        assert len(lines) >= wanted
        for line in lines:
            what, _, run_id = line.strip().partition(" ")
            if len(run_id) == 36:  # the last line may be cut
                (opened if what == "open" else done).add(run_id)

        store = SqlStore.open(url)
        kept = {run.id: run async for run in store.stream(HistoryFilter())}
        assert opened <= kept.keys()
        assert all(kept[run_id].status is Status.SUCCEEDED for run_id in done)
        for run_id, run in kept.items():
            record = await store.record(run_id)
            assert record is not None
            expected = ["started", "acted"] if run.is_open else ["started", "acted", "ended"]
            assert [one.kind for one in record.events] == expected
            assert len(record.alerts) == len(run.steps) == 1
        for run in kept.values():  # make room: each target's next run is to open
            if run.is_open:
                await store.transact(_close(run))
        await store.close()


def _close(run: Run) -> Callable[[Transaction], None]:
    closed = replace(run, status=Status.CANCELLED, ended_at=run.created_at)

    def work(tx: Transaction) -> None:
        tx.save_runs([(closed, run)])
        tx.append([event("ended", run.id)])

    return work
