"""`ports.tallies`: what every run store promises of the counts by playbook."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, time, timedelta

import sqlalchemy as sa
from msgspec.structs import replace

from tests.contract import run_store_values as values
from tests.contract.run_store_values import at, closed, gpu, heard, not_started, run
from trainmedic_server.adapters.sql_store import schema
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.domain.effect import Effect, EffectVerdict
from trainmedic_server.domain.run import OperatorOrder, OrderKind, Run, Status, StepStatus
from trainmedic_server.ports.store import Transaction
from trainmedic_server.ports.tallies import PlaybookTally

_BEGIN = datetime.combine(at(0).date(), time(), UTC)
WHOLE_DAYS = (_BEGIN - timedelta(days=1), _BEGIN + timedelta(days=1))


async def add(store: SqlStore, *runs: Run) -> None:
    await store.transact(lambda tx: tx.save_alerts([heard()]))
    await store.transact(lambda tx: tx.add_runs(runs))


async def test_runs_are_counted_by_playbook_and_status_in_a_period(store: SqlStore) -> None:
    """Decisions not to start are included; `since` is inclusive and `until` exclusive."""
    before, after = closed(0, gpu(7)), closed(60, gpu(8))
    await add(store, before, run(5), closed(1), closed(2), not_started(3), closed(4, playbook="rollback"), after)
    tallies = await store.tally(at(1), at(60))
    assert {name: dict(tally.statuses) for name, tally in tallies.items()} == {
        "cool": {Status.RUNNING: 1, Status.SUCCEEDED: 2, Status.NOT_STARTED: 1},
        "rollback": {Status.SUCCEEDED: 1},
    }
    assert tallies["cool"].started == 3
    assert await store.tally(at(100), at(200)) == {}


async def test_outcomes_of_runs_are_counted(store: SqlStore) -> None:
    """Each run counts once, however many of its steps timed out or how often its undo was ordered."""
    late = tuple(values.step(index, status=StepStatus.TIMED_OUT) for index in range(2))
    asked = values.step(kind="approve", action=None, status=StepStatus.SUCCEEDED, started_at=at(1), ended_at=at(4))
    slow = closed(1, gpu(1), ended_at=at(3), steps=late)
    unanswered = replace(asked, index=1, deadline=at(4))  # `on_timeout: approve`
    answered = closed(1, gpu(2), steps=(asked, unanswered))
    observed = closed(1, gpu(3), status=Status.OBSERVED, steps=late)
    await add(store, slow, answered, observed)
    orders = [OperatorOrder(f"o{number}", slow.id, OrderKind.UNDO, "ann", at(5)) for number in range(2)]
    for order in orders:
        await store.transact(lambda tx, order=order: tx.add_order(order))  # type: ignore[misc]
    known = Effect(slow.id, "cool", at(1), None, EffectVerdict.HELPED)
    await store.transact(lambda tx: tx.effects.save([known]))
    tally = (await store.tally(at(0), at(60)))["cool"]
    assert (tally.timed_out, tally.undone_by_hand, tally.started) == (1, 1, 2)
    assert tally.person_seconds == {180.0: 1}
    assert 120.0 in tally.repair_seconds
    assert tally.effects == {EffectVerdict.HELPED: 1}
    assert await store.effects_between(at(0), at(60), 9) == {slow.id: EffectVerdict.HELPED}
    assert await store.effects_between(at(2), at(60), 9) == {}


async def test_a_run_within_an_hour_of_the_last_on_its_target_is_repeated(store: SqlStore) -> None:
    """The hour counts from the end of the playbook's last run, which may lie before the period in question."""
    first, soon = closed(0, ended_at=at(10)), closed(69, ended_at=at(70))
    later, elsewhere = closed(131, ended_at=at(132)), closed(69, gpu(9), ended_at=at(70))
    other = closed(72, playbook="rollback", ended_at=at(73))
    await add(store, first, soon, later, elsewhere, other)
    tallies = await store.tally(at(60), at(200))
    assert {name: tally.repeated for name, tally in tallies.items()} == {"cool": 1, "rollback": 0}


async def test_whole_days_add_up_to_the_count_of_their_runs(store: SqlStore) -> None:
    """This holds however runs changed since they were first counted, and for any number of transactions."""
    late = values.step(status=StepStatus.TIMED_OUT)
    asked = values.step(1, kind="approve", action=None, status=StepStatus.REJECTED, started_at=at(1), ended_at=at(4.4))
    asked = replace(asked, deadline=at(5))
    unanswered = replace(asked, index=2, id="steps-2", deadline=asked.ended_at)
    begun = [run(minute, gpu(minute % 3), playbook=("cool", "rollback")[minute % 2]) for minute in range(12)]
    ended: list[Run] = []
    for each in begun:
        await add(store, each)
        end = closed(0, status=(Status.SUCCEEDED, Status.FAILED, Status.REJECTED)[len(ended) % 3], ended_at=at(90.77))
        steps = (late, asked, unanswered)[: len(ended) % 3 + len(ended) % 3 // 2]
        ended.append(replace(each, status=end.status, ended_at=end.ended_at, steps=steps))
        waiting = replace(each, status=Status.WAITING)
        await store.transact(lambda tx, change=(waiting, each): tx.save_runs([change]))  # type: ignore[misc]
        await store.transact(lambda tx, change=(ended[-1], None): tx.save_runs([change]))  # type: ignore[misc]
    await add(store, not_started(3), closed(95, gpu(0)), run(96, gpu(1)), closed(97, gpu(2), status=Status.OBSERVED))
    await store.transact(lambda tx: tx.add_order(OperatorOrder("o", begun[0].id, OrderKind.UNDO, "ann", at(5))))
    pending = Effect(begun[1].id, "rollback", at(1), at(2))
    for effect in (pending, replace(pending, verdict=EffectVerdict.WORSE, due_at=None)):
        await store.transact(lambda tx, effect=effect: tx.effects.save([effect]))  # type: ignore[misc]
    by_day = await store.tally(*WHOLE_DAYS)
    await store.transact(lambda tx: _count_none(tx.flushed_connection()))  # type: ignore[attr-defined]
    assert by_day == await store.tally(*WHOLE_DAYS)
    assert {type(count) for tally in by_day.values() for count in _counts_of(tally)} == {int}  # as JSON needs them
    assert (by_day["cool"].undone_by_hand, by_day["cool"].repeated, by_day["cool"].timed_out) == (1, 2, 4)
    assert by_day["cool"].person_seconds == {200.0: 2}
    assert by_day["rollback"].effects == {EffectVerdict.WORSE: 1}


async def test_a_run_barred_after_waiting_counts_only_as_barred(store: SqlStore) -> None:
    """Neither as repeated nor for an approval before it was barred, counted by days or by runs."""
    asked = values.step(kind="approve", action=None, status=StepStatus.SUCCEEDED, started_at=at(21), ended_at=at(24))
    late = values.step(1, status=StepStatus.TIMED_OUT)
    await add(store, closed(0, ended_at=at(10)))
    waiting = run(20)
    await add(store, waiting)
    barred = replace(waiting, status=Status.NOT_STARTED, ended_at=at(30), steps=(asked, late))
    await store.transact(lambda tx: tx.save_runs([(barred, waiting)]))
    by_day = await store.tally(*WHOLE_DAYS)
    await store.transact(lambda tx: _count_none(tx.flushed_connection()))  # type: ignore[attr-defined]
    assert by_day == await store.tally(*WHOLE_DAYS)
    assert (by_day["cool"].repeated, by_day["cool"].timed_out, by_day["cool"].person_seconds) == (0, 0, {})


async def test_a_run_is_repeated_even_if_the_one_before_ends_in_its_transaction(store: SqlStore) -> None:
    """Pending writes are sent before the ends are looked up, and no count is lost."""
    first = run(0)
    await add(store, first)
    ended = replace(first, status=Status.SUCCEEDED, ended_at=at(10))

    def both(tx: Transaction) -> None:
        tx.save_runs([(ended, first)])
        tx.add_runs([closed(20)])

    await store.transact(both)
    assert (await store.tally(*WHOLE_DAYS))["cool"].repeated == 1


async def test_a_run_that_ends_after_its_day_was_deleted_leaves_no_negative_count(store: SqlStore) -> None:
    """It was open for longer than closed runs are kept, and counts with its final status."""
    waiting = run(0)
    await add(store, waiting)
    await store.prune(_BEGIN + timedelta(days=1))
    ended = replace(waiting, status=Status.FAILED, ended_at=at(90))
    await store.transact(lambda tx: tx.save_runs([(ended, waiting)]))
    assert (await store.tally(*WHOLE_DAYS))["cool"].statuses == {Status.FAILED: 1}


def _counts_of(tally: PlaybookTally) -> list[int]:
    counters = (tally.statuses, tally.effects, tally.repair_seconds, tally.person_seconds)
    return [tally.timed_out, tally.repeated, *(count for counter in counters for count in counter.values())]


def _count_none(connection: sa.Connection) -> None:
    """No day is counted, as in a store of an earlier release."""
    connection.execute(sa.delete(schema.identity))
    connection.execute(sa.insert(schema.identity).values(id="of-the-test", counted_from=10**6))


def test_tallies_add_up() -> None:
    """Days add up to a month."""
    total, day = PlaybookTally(), PlaybookTally(timed_out=1, repair_seconds=Counter([1.0]))
    day.statuses[Status.FAILED] = 2
    for _ in range(3):
        total.add(day)
    assert (total.timed_out, total.started, total.repair_seconds) == (3, 6, {1.0: 3})
    assert (day.timed_out, day.started) == (1, 2)
