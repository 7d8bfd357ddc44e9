"""A change of a run that was planned without a rejection is not kept once the store has the rejection."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.contract.run_store_values import at, event, heard, run
from trainmedic_server import telemetry
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.domain.run import OperatorOrder, OrderKind, Run
from trainmedic_server.engine.recorder import Recorder, Seen
from trainmedic_server.ports.store import Transaction


async def keep(store: SqlStore, one: Run, *orders: OrderKind) -> None:
    def work(tx: Transaction) -> None:
        tx.save_alerts([heard()])
        tx.add_runs([one])
        tx.link([(one.id, heard().identity)])
        for number, kind in enumerate(orders):
            tx.add_order(OperatorOrder(f"order-{number}", one.id, kind, "ann", at(1)))

    await store.transact(work)


@pytest.mark.parametrize(
    ("orders", "seen", "is_kept"),
    [
        ([OrderKind.REJECT], Seen(1, 0), False),
        ([OrderKind.REJECT], Seen(1, 1), True),
        ([OrderKind.REJECT], Seen(2, 1), False),
        ([OrderKind.REJECT], Seen(1, None), True),
        ([OrderKind.APPROVE], Seen(1, 0), True),
        ([], Seen(1, 0), True),
        ([], Seen(), True),
    ],
)
async def test_a_change_is_kept_only_with_the_rejections_it_was_planned_with(
    store: SqlStore, orders: list[OrderKind], seen: Seen, is_kept: bool
) -> None:
    """Otherwise the run would end differently from what its operator was told."""
    one = run()
    await keep(store, one, *orders)
    recorder = Recorder(store, telemetry.Metrics())
    changed = replace(one, message="changed")
    assert await recorder.record(changed, one, (event("closed", one.id),), seen) is is_kept
    snapshot = await recorder.snapshot(one.id)
    assert snapshot is not None
    assert (snapshot.run == changed) is is_kept
    await recorder.stop()


async def test_only_the_outdated_one_of_several_changes_is_dropped(store: SqlStore) -> None:
    """They share one transaction."""
    ended = run()
    await keep(store, ended, OrderKind.REJECT)
    recorder = Recorder(store, telemetry.Metrics())
    dropped, kept = replace(ended, message="dropped"), replace(ended, message="kept")
    assert not await recorder.record(dropped, ended, (), Seen(None, 0))
    assert await recorder.record(kept, ended, (), Seen(None, 1))
    snapshot = await recorder.snapshot(ended.id)
    assert snapshot is not None
    assert snapshot.run.message == "kept"
    await recorder.stop()
