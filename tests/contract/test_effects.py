"""`ports.effects`: what every run store promises of measured effects, and of listeners to the events."""

from __future__ import annotations

from datetime import timedelta

from msgspec.structs import replace

from tests.contract.run_store_values import at, closed, heard
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.domain.effect import Effect, EffectVerdict
from trainmedic_server.domain.run import Run


def made(run: Run, minute: float) -> Effect:
    """One that is due at that minute."""
    return Effect(run.id, run.playbook, at(0), at(minute))


async def stored_runs(store: SqlStore) -> list[Run]:
    runs = [closed(0), closed(1), closed(2)]
    await store.transact(lambda tx: tx.save_alerts([heard()]))
    await store.transact(lambda tx: tx.add_runs(runs))
    return runs


async def test_an_effect_is_due_until_measured_and_is_kept_with_its_run(store: SqlStore) -> None:
    """The effect that became due first comes first; readers see the measured values."""
    first, second, third = await stored_runs(store)
    late, early = made(first, 10), made(second, 5)
    await store.transact(lambda tx: tx.effects.save([late, early, made(third, 11)]))
    assert await store.transact(lambda tx: tx.effects.due(at(10), 9)) == [early, late]
    assert await store.transact(lambda tx: tx.effects.due(at(10), 1)) == [early]
    known = replace(
        late, due_at=None, verdict=EffectVerdict.HELPED, at=4.5, after=2.0, series=((1.0, 4.5), (2.0, None))
    )
    await store.transact(lambda tx: tx.effects.save([known]))
    assert await store.transact(lambda tx: tx.effects.due(at(60), 9)) == [early, made(third, 11)]
    assert await store.transact(lambda tx: tx.effects.of_runs([first.id, "none"])) == {first.id: known}
    record = await store.record(first.id)
    assert record is not None
    assert record.effect == known


async def test_an_effect_is_deleted_with_its_run(store: SqlStore) -> None:
    """Pruning deletes both; a run without an effect has none."""
    first, second, _ = await stored_runs(store)
    await store.transact(lambda tx: tx.effects.save([made(first, 10)]))
    record = await store.record(second.id)
    assert record is not None
    assert record.effect is None
    assert await store.prune(at(0) + timedelta(days=1)) == 3
    assert await store.transact(lambda tx: tx.effects.of_runs([first.id])) == {}


async def test_a_listener_continues_from_its_position(store: SqlStore) -> None:
    """Each listener has its own position; one that never listened has none."""
    assert await store.transact(lambda tx: tx.event_positions.position("grafana")) is None
    await store.transact(lambda tx: tx.event_positions.save_position("grafana", 7))
    await store.transact(lambda tx: tx.event_positions.save_position("effects", 9))
    await store.transact(lambda tx: tx.event_positions.save_position("grafana", 8))
    assert await store.transact(lambda tx: tx.event_positions.position("grafana")) == 8
    assert await store.transact(lambda tx: tx.event_positions.position("effects")) == 9
