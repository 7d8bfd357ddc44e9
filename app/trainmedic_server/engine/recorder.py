"""Batched commits of run changes, and reads of external changes.

An unavailable store is retried, to lose no known outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

from trainmedic.wire.backoff import Backoff
from trainmedic_server import errors, telemetry
from trainmedic_server.domain.alert import AlertRecord
from trainmedic_server.domain.run import Event, OperatorOrder, OrderKind, Run
from trainmedic_server.engine.batching import Batcher
from trainmedic_server.ports.store import RunStore, Transaction

# Changes, or reads, of one transaction. Larger ones would delay deliveries, which share the only writer; smaller ones
# would prolong a storm (``benchmarks.alert_storm``).
_BATCH = 200

_FOR_MEMBERS = (OrderKind.CANCEL, OrderKind.UNDO, OrderKind.CLOSE_UNDO)  # of a parent's orders
T = TypeVar("T")

log = telemetry.logger(__name__)


class RunSnapshot(Struct, frozen=True):
    run: Run
    alerts: tuple[AlertRecord, ...]  # the initial one first
    orders: tuple[OperatorOrder, ...]  # oldest first


class Seen(Struct, frozen=True):
    """Numbers of alerts and rejections at planning; None if irrelevant."""

    alerts: int | None = None
    rejections: int | None = None


def rejections(orders: Sequence[OperatorOrder]) -> int:
    return sum(order.kind is OrderKind.REJECT for order in orders)


def _orders_of(run: Run, orders: Mapping[str, Sequence[OperatorOrder]]) -> tuple[OperatorOrder, ...]:
    """Return the run's orders. A member also follows its parent's, except answers to questions."""
    own = orders.get(run.id, ())
    if run.parent is None:
        return tuple(own)
    of_parent = [order for order in orders.get(run.parent, ()) if order.kind in _FOR_MEMBERS]
    return tuple(sorted([*own, *of_parent], key=lambda order: order.id))  # IDs sort by time


class _Change(Struct, frozen=True):
    run: Run
    before: Run | None
    events: tuple[Event, ...]
    seen: Seen


class Recorder:
    def __init__(self, store: RunStore, metrics: telemetry.Metrics) -> None:
        self._store = store
        self._changes: Batcher[_Change, bool] = Batcher(self._write, most=_BATCH, watch=metrics.batch_watch("changes"))
        self._reads: Batcher[str, RunSnapshot | None] = Batcher(
            self._read, most=_BATCH, watch=metrics.batch_watch("reads")
        )

    async def record(self, run: Run, before: Run | None, events: tuple[Event, ...], seen: Seen = Seen()) -> bool:
        """Return True once the change and its events are durable; False, with nothing stored, if the numbers differ
        from `seen`.
        """
        return await self._changes.ask(_Change(run, before, events, seen))

    async def snapshot(self, run_id: str) -> RunSnapshot | None:
        return await self._reads.ask(run_id)

    async def stop(self) -> None:
        await self._changes.stop()
        await self._reads.stop()

    async def _write(self, changes: Sequence[_Change]) -> list[bool]:
        def work(tx: Transaction) -> list[bool]:
            alerts = tx.alert_counts([change.run.alerts_run_id for change in changes if change.seen.alerts is not None])
            asked = [change.run.id for change in changes if change.seen.rejections is not None]
            orders = tx.orders_of(asked) if asked else {}
            is_kept = [
                change.seen.alerts in (None, alerts.get(change.run.alerts_run_id, 0))
                and change.seen.rejections in (None, rejections(orders.get(change.run.id, ())))
                for change in changes
            ]
            kept = [change for change, keep in zip(changes, is_kept, strict=True) if keep]
            tx.save_runs([(change.run, change.before) for change in kept if change.run is not change.before])
            tx.append([event for change in kept for event in change.events])
            return is_kept

        return await self.transact(work)

    async def _read(self, run_ids: Sequence[str]) -> list[RunSnapshot | None]:
        def work(tx: Transaction) -> dict[str, RunSnapshot]:
            runs = tx.runs(set(run_ids))
            parents_or_own = {run.alerts_run_id for run in runs}
            alerts, orders = tx.alerts_of(parents_or_own), tx.orders_of(parents_or_own | {run.id for run in runs})
            return {
                run.id: RunSnapshot(run, tuple(alerts.get(run.alerts_run_id, ())), _orders_of(run, orders))
                for run in runs
            }

        snapshots = await self.transact(work)
        return [snapshots.get(run_id) for run_id in run_ids]

    async def transact(self, work: Callable[[Transaction], T]) -> T:
        """Repeat it while the store is unavailable."""
        backoff = Backoff(first=0.1, longest=5.0)
        while True:
            try:
                return await self._store.transact(work)
            except errors.StoreUnavailable as error:
                wait = backoff.next()
                log.error("run store unavailable; retrying", error=str(error), retry_in=wait)
                await asyncio.sleep(wait)
