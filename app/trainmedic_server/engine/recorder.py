"""Making the changes of runs durable, and reading back what others changed; both in batches.

A driver goes on only when `record` has returned: intent before act, outcome after. A store that is
away is waited for, because an outcome that is known must not be lost while the process lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from trainmedic_server import errors, telemetry
from trainmedic_server.domain.alert import AlertRecord
from trainmedic_server.domain.run import Event, OperatorOrder, Run
from trainmedic_server.engine.batching import Batcher
from trainmedic_server.ports.store import RunStore, Transaction

_LONGEST_BACKOFF = 5.0
_BATCH = 200
"""More would make deliveries, which share the store's one writer, wait longer in a storm; fewer would
make the storm last longer (``benchmarks.alert_storm``)."""

log = telemetry.logger(__name__)


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run as the store has it, with its alerts and orders."""

    run: Run
    alerts: tuple[AlertRecord, ...]
    orders: tuple[OperatorOrder, ...]


@dataclass(frozen=True, slots=True)
class _Change:
    run: Run
    before: Run | None
    events: tuple[Event, ...]
    alerts: int | None


class Recorder:
    """The engine's access to the store, apart from admission."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._changes: Batcher[_Change, bool] = Batcher(self._write, most=_BATCH)
        self._questions: Batcher[str, RunSnapshot | None] = Batcher(self._read, most=_BATCH)

    async def record(self, run: Run, before: Run | None, events: tuple[Event, ...], alerts: int | None = None) -> bool:
        """Return True once the run's change and its events are durable.

        With `alerts`, only if exactly so many alerts are tied to the run, and False if others have
        joined it: a run must not close over the head of an alert that was told it is seen to.
        """
        return await self._changes.ask(_Change(run, before, events, alerts))

    async def snapshot(self, run_id: str) -> RunSnapshot | None:
        """The run as the store has it now; None where there is none."""
        return await self._questions.ask(run_id)

    async def stop(self) -> None:
        await self._changes.stop()
        await self._questions.stop()

    async def _write(self, changes: Sequence[_Change]) -> list[bool]:
        kept: list[bool] = []

        def work(tx: Transaction) -> None:
            counts = tx.alert_counts([change.run.id for change in changes if change.alerts is not None])
            kept[:] = [change.alerts in (None, counts.get(change.run.id, 0)) for change in changes]
            fitting = [change for change, fits in zip(changes, kept, strict=True) if fits]
            tx.save_runs([(change.run, change.before) for change in fitting if change.run is not change.before])
            tx.append([event for change in fitting for event in change.events])

        await self._until_it_answers(work)
        return kept

    async def _read(self, run_ids: Sequence[str]) -> list[RunSnapshot | None]:
        found: dict[str, RunSnapshot] = {}

        def work(tx: Transaction) -> None:
            wanted = set(run_ids)
            alerts, orders = tx.alerts_of(wanted), tx.orders_of(wanted)
            for run in tx.runs(wanted):
                found[run.id] = RunSnapshot(run, tuple(alerts.get(run.id, ())), tuple(orders.get(run.id, ())))

        await self._until_it_answers(work)
        return [found.get(run_id) for run_id in run_ids]

    async def _until_it_answers(self, work: object) -> None:
        backoff = 0.1
        while True:
            try:
                await self._store.transact(work)  # type: ignore[arg-type]
                return
            except errors.StoreUnavailable as error:
                log.error("the run store is away; trying again", error=str(error), retry_in=backoff)
                await asyncio.sleep(backoff)
                backoff = min(backoff * 2, _LONGEST_BACKOFF)
