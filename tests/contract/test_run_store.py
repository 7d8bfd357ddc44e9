"""`ports.RunStore` and `ports.Transaction`: what every run store promises."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.contract import run_store_values as values
from tests.contract.run_store_values import at, closed, event, gpu, heard, not_started, run, step, undo
from tests.support.examples import examples
from trainmedic_core.target import Target, TargetKind
from trainmedic_server import errors
from trainmedic_server.adapters.sql_store import schema
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.adapters.sql_store.transaction import SqlTransaction
from trainmedic_server.domain.alert import AlertRecord, Identity
from trainmedic_server.domain.job_life import JobLife, LifeState
from trainmedic_server.domain.memory import LastRun, RunMemory
from trainmedic_server.domain.run import (
    Controls,
    Decision,
    Event,
    OperatorOrder,
    OrderKind,
    Run,
    Status,
    StepStatus,
    UndoStatus,
)
from trainmedic_server.domain.time_gaps import TimeGap
from trainmedic_server.ports.store import GuardFacts, HistoryFilter, LinkedRun, Transaction

Tx = Transaction

COOL = ("cool", gpu().key)

any_values = settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


async def keep(store: SqlStore, *runs: Run, alerts: list[AlertRecord] | None = None) -> None:
    """Have the store keep these alerts (f1 if none are given) and runs, each tied to its alert."""
    records = alerts or [heard()]

    def work(tx: Tx) -> None:
        tx.save_alerts(records)
        tx.add_runs(runs)
        tx.link([(one.id, records[0].identity) for one in runs])

    await store.transact(work)


# --- transactions -----------------------------------------------------------------------------------


async def test_transact_returns_what_the_work_returns(store: SqlStore) -> None:
    assert await store.transact(lambda tx: 42) == 42


async def test_a_transaction_sees_its_own_writes(store: SqlStore) -> None:
    """Within one unit, every read sees the unit's own writes of every kind."""

    def work(tx: Tx) -> None:
        one = run()
        tx.save_alerts([heard()])
        assert tx.alerts([heard().identity]) == {heard().identity: heard()}
        assert tx.firing_with(["f1"]) == [heard()]
        tx.add_runs([one])
        assert tx.open_runs_for([COOL]) == {COOL: one.id}
        assert tx.guard_facts([COOL], {})[COOL].open_runs == 1
        assert tx.nodes_acted_on(at(-1)) == {"node-1"}
        tx.link([(one.id, heard().identity)])
        assert [linked.run_id for linked in tx.linked_runs([heard().identity])[heard().identity]] == [one.id]
        assert tx.alerts_of([one.id]) == {one.id: [heard()]}
        tx.save_runs([(replace(one, message="changed"), one)])
        assert tx.run(one.id) == replace(one, message="changed")
        tx.add_order(OperatorOrder("o1", one.id, OrderKind.CANCEL, "kim", at(1)))
        assert [order.id for order in tx.orders_of([one.id])[one.id]] == ["o1"]
        tx.remember_nodes(["node-9"], at(0))
        assert "node-9" in tx.known_nodes()
        tx.save_controls(Controls(paused=True))
        assert tx.controls().paused
        tx.keep_playbook("cool", "v1", "playbook: cool", at(0))
        assert tx.playbook_text("cool", "v1") == "playbook: cool"

    await store.transact(work)


async def test_the_newest_alert_of_a_fingerprint_is_found_resolved_or_not(store: SqlStore) -> None:
    """Also one that the same unit has written."""

    older, newer = heard(), heard(minute=1, resolved_at=at(2), resolved_because="assumed")

    def work(tx: Tx) -> None:
        tx.save_alerts([older])
        assert tx.newest_alerts(["f1", "f2"]) == {"f1": older}
        tx.save_alerts([newer])
        assert tx.newest_alerts(["f1"]) == {"f1": newer}

    await store.transact(work)
    assert await store.transact(lambda tx: tx.newest_alerts(["f1", "f2"])) == {"f1": newer}


async def test_a_raising_unit_leaves_nothing(store: SqlStore) -> None:
    """If the work raises, the caller gets its error and nothing is kept, even if it was read back in the unit."""
    one = run()

    def work(tx: Tx) -> None:
        tx.save_alerts([heard("other")])
        tx.add_runs([one])
        assert tx.run(one.id) == one  # forces what was written so far into the database
        tx.remember_nodes(["node-9"], at(0))
        assert tx.nodes_acted_on(at(-1)) == {"node-1"}
        tx.append([event("started", one.id)])
        tx.save_controls(Controls(paused=True))
        raise errors.NotFound("changed my mind")

    with pytest.raises(errors.NotFound, match="changed my mind"):
        await store.transact(work)

    def look(tx: Tx) -> None:
        assert tx.alerts([heard("other").identity]) == {}
        assert tx.run(one.id) is None
        assert tx.open_runs_for([COOL]) == {}
        assert tx.guard_facts([COOL], {})[COOL] == GuardFacts()
        assert tx.nodes_acted_on(at(-1)) == set()
        assert tx.known_nodes() == set()
        assert tx.controls() == Controls()

    await store.transact(look)
    assert await store.events_after(0, 10) == []


async def test_a_raising_unit_restores_what_it_replaced(store: SqlStore) -> None:
    """The replaced data are as before, not gone."""
    one = run()
    await keep(store, one)

    def work(tx: Tx) -> None:
        tx.save_runs([(replace(one, status=Status.FAILED, ended_at=at(1)), one)])
        tx.save_alerts([heard(resolved_at=at(1), resolved_because="alertmanager")])
        assert tx.open_runs_for([COOL]) == {}
        assert tx.firing_with(["f1"]) == []
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await store.transact(work)
    assert await store.transact(lambda tx: tx.run(one.id)) == one
    assert await store.transact(lambda tx: tx.open_runs_for([COOL])) == {COOL: one.id}
    assert await store.transact(lambda tx: tx.firing_with(["f1"])) == [heard()]


async def test_concurrent_units_are_isolated_from_one_that_raises(store: SqlStore) -> None:
    """Of many concurrent units, those that raise lose their writes and the others keep theirs."""

    def unit(number: int, tx: Tx) -> int:
        tx.append([event(f"e{number}")])
        tx.remember_nodes([f"node-{number}"], at(0))
        if number % 3 == 0:
            assert f"node-{number}" in tx.known_nodes()
        if number % 5 == 0:
            raise errors.Conflict(f"unit {number}")
        return number

    outcomes = await asyncio.gather(
        *(store.transact(lambda tx, number=number: unit(number, tx)) for number in range(40)), return_exceptions=True
    )
    kept = [number for number in range(40) if number % 5]
    assert [outcome for outcome in outcomes if isinstance(outcome, int)] == kept
    assert sum(isinstance(outcome, errors.Conflict) for outcome in outcomes) == 8
    assert [one.kind for one in await store.events_after(0, 100)] == [f"e{number}" for number in kept]
    assert await store.transact(lambda tx: tx.known_nodes()) == {f"node-{number}" for number in kept}


async def test_concurrent_units_are_serialized(store: SqlStore) -> None:
    """Of many units that each open a run unless there is one, exactly one does."""

    def admit(tx: Tx) -> str:
        known = tx.open_runs_for([COOL])
        if COOL in known:
            return known[COOL]
        one = run()
        tx.add_runs([one])
        return one.id

    ids = await asyncio.gather(*(store.transact(admit) for _ in range(20)))
    assert len(set(ids)) == 1


async def test_a_second_open_run_for_the_same_playbook_and_target_is_refused(store: SqlStore) -> None:
    """At most one run is open per playbook and target; only the unit that would break this raises Conflict."""
    one, two, elsewhere = run(), run(), run(target=gpu(1))
    outcomes = await asyncio.gather(
        store.transact(lambda tx: tx.add_runs([one])),
        store.transact(lambda tx: tx.add_runs([two])),
        store.transact(lambda tx: tx.add_runs([elsewhere])),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [type(None), errors.Conflict, type(None)]
    assert await store.transact(lambda tx: tx.runs([one.id, two.id, elsewhere.id])) == sorted(
        [one, elsewhere], key=lambda kept: kept.id
    )


async def test_a_refused_write_fails_its_own_unit_even_if_a_later_one_detects_it(store: SqlStore) -> None:
    """If a refusal shows only in a later unit's read, the earlier unit still gets the error."""
    one, two, elsewhere = run(), run(), run(target=gpu(1))

    def reads(tx: Tx) -> list[Run]:
        tx.add_runs([elsewhere])
        return tx.unfinished()

    await keep(store, one)
    outcomes = await asyncio.gather(
        store.transact(lambda tx: tx.append([event("first")])),
        store.transact(lambda tx: tx.add_runs([two])),
        store.transact(reads),
        return_exceptions=True,
    )
    assert outcomes[0] is None
    assert isinstance(outcomes[1], errors.Conflict)
    assert isinstance(outcomes[2], list)
    assert {kept.id for kept in outcomes[2]} == {one.id, elsewhere.id}
    assert [kept.kind for kept in await store.events_after(0, 10)] == ["first"]


async def test_a_run_can_open_in_the_unit_that_closes_the_last_one(store: SqlStore) -> None:
    """Closing a run allows the next one of the same playbook and target at once."""
    one, two = run(), run(5)
    await keep(store, one)

    def work(tx: Tx) -> None:
        tx.save_runs([(replace(one, status=Status.SUCCEEDED, ended_at=at(5)), one)])
        tx.add_runs([two])

    await store.transact(work)
    assert await store.transact(lambda tx: tx.open_runs_for([COOL])) == {COOL: two.id}


async def test_adding_a_run_twice_is_refused(store: SqlStore) -> None:
    """A run id is used once."""
    one = closed()
    await keep(store, one)
    with pytest.raises(errors.Conflict):
        await store.transact(lambda tx: tx.add_runs([one]))


async def test_a_closed_store_is_unavailable(store: SqlStore) -> None:
    """After close(), every call raises StoreUnavailable; closing again does nothing."""
    await store.check()
    await store.close()
    await store.close()
    calls: list[Any] = [
        store.transact(lambda tx: None),
        store.check(),
        store.prune(at(0)),
        store.page(HistoryFilter(), 1, None),
        store.record("x"),
        store.events_after(0, 1),
        store.last_seq(),
        store.tally(at(0), at(1)),
        store.effects_between(at(0), at(1), 1),
    ]
    for call in calls:
        with pytest.raises(errors.StoreUnavailable):
            await call


async def test_pending_units_are_carried_out_before_closing(store: SqlStore) -> None:
    """close() waits for the pending units."""
    waiting = [asyncio.ensure_future(store.transact(lambda tx: tx.append([event()]))) for _ in range(10)]
    await asyncio.sleep(0)
    await store.close()
    assert await asyncio.gather(*waiting) == [None] * 10


# --- alerts -----------------------------------------------------------------------------------------


async def test_alerts_are_identified_by_fingerprint_and_start(store: SqlStore) -> None:
    """Two starts of one fingerprint are two alerts; unknown ones are missing from the result."""
    early, late = heard("f1", 0), heard("f1", 5)
    await store.transact(lambda tx: tx.save_alerts([early, late]))
    unknown = Identity("f1", at(1))
    found = await store.transact(lambda tx: tx.alerts([early.identity, late.identity, unknown]))
    assert found == {early.identity: early, late.identity: late}


async def test_saving_an_alert_again_replaces_it(store: SqlStore) -> None:
    """The last saved record of an identity counts."""
    first = heard()
    again = replace(first, last_heard_at=at(9), count=2, resolved_at=at(9), resolved_because="alertmanager")
    await store.transact(lambda tx: tx.save_alerts([first]))
    await store.transact(lambda tx: tx.save_alerts([again]))
    assert await store.transact(lambda tx: tx.alerts([first.identity])) == {first.identity: again}


async def test_firing_with_finds_every_unresolved_start(store: SqlStore) -> None:
    """All unresolved alerts of these fingerprints only, whatever their start."""
    records = [heard("f1", 0), heard("f1", 3), heard("f1", 2, resolved_at=at(4)), heard("f2", 0), heard("f3", 0)]
    await store.transact(lambda tx: tx.save_alerts(records))
    found = await store.transact(lambda tx: tx.firing_with(["f1", "f2", "unknown"]))
    assert {record.identity for record in found} == {("f1", at(0)), ("f1", at(3)), ("f2", at(0))}


async def test_firing_alerts_are_found_by_their_current_names(store: SqlStore) -> None:
    """Others are not read. The name is the last report's, because an alert map may have changed."""

    def named(fingerprint: str, name: str, **changes: Any) -> AlertRecord:
        record = heard(fingerprint, **changes)
        labels = {'x"alertname': "H", "note": 'a\0 ,"alertname":"H",', "alertname": name, "job_name": "llm"}
        return replace(record, alert=replace(record.alert, labels=labels))

    before = [named("f1", "Hot"), named("f2", "Hot"), named("f3", "H_t"), named("f4", "Hot", resolved_at=at(4))]
    await store.transact(lambda tx: tx.save_alerts([*before, named("f5", 'a "Hot" 100 % \\'), named("f6", "Cold")]))
    await store.transact(lambda tx: tx.save_alerts([named("f2", "Cold")]))

    async def found(names: set[str]) -> set[str]:
        records = await store.transact(lambda tx: tx.firing(100, names))
        return {record.alert.fingerprint for record in records}

    assert await found({"Hot"}) == {"f1"}
    assert await found({"H_t", "Cold"}) == {"f2", "f3", "f6"}
    assert await found({'a "Hot" 100 % \\'}) == {"f5"}
    assert await found({"hot", "H", "a\0"}) == await found(set()) == set()
    assert await found({"Hot", *(f"Other{number}" for number in range(2000))}) == {"f1"}
    assert len(await store.transact(lambda tx: tx.firing(100))) == 5
    assert len(await store.transact(lambda tx: tx.firing(1, {"Cold"}))) == 1


async def test_many_identities_can_be_queried_at_once(store: SqlStore) -> None:
    """A storm's keys are one query, whatever statement limits a database has."""
    records = [heard(f"f{number}") for number in range(3000)]
    await store.transact(lambda tx: tx.save_alerts(records))
    found = await store.transact(lambda tx: tx.alerts([record.identity for record in records]))
    assert len(found) == 3000
    assert len(await store.transact(lambda tx: tx.firing_with([f"f{number}" for number in range(3000)]))) == 3000


async def test_silent_alerts_are_those_of_runs_that_still_depend_on_them(store: SqlStore) -> None:
    """Unresolved, last received before the moment, and tied to a run that is open or has a pending undo."""
    names = ["open", "owing", "done", "resolved", "recent", "untied"]
    records = {name: heard(name) for name in names}
    records["resolved"] = heard("resolved", resolved_at=at(1))
    records["recent"] = heard("recent", last_heard_at=at(60))
    armed = step(undo=undo(), status=StepStatus.SUCCEEDED)
    runs = {
        "open": run(target=gpu(1)),
        "owing": closed(target=gpu(2), steps=(armed,)),
        "done": closed(target=gpu(3)),
        "resolved": run(target=gpu(4)),
        "recent": run(target=gpu(5)),
    }

    def work(tx: Tx) -> None:
        tx.save_alerts(list(records.values()))
        tx.add_runs(list(runs.values()))
        tx.link([(one.id, records[name].identity) for name, one in runs.items()])

    await store.transact(work)
    found = await store.transact(lambda tx: tx.firing_not_heard_since(at(30)))
    assert {record.alert.fingerprint for record in found} == {"open", "owing"}


@any_values
@given(record=values.any_record)
async def test_any_alert_is_read_as_it_was_saved(store: SqlStore, record: AlertRecord) -> None:
    """The record equals what was saved, to the microsecond and in any script."""
    await store.transact(lambda tx: tx.save_alerts([record]))
    kept = (await store.transact(lambda tx: tx.alerts([record.identity])))[record.identity]
    # The same identity may have come before: when an alert was first heard of is not replaced.
    assert replace(kept, first_heard_at=record.first_heard_at) == record


# --- runs -------------------------------------------------------------------------------------------


@any_values
@given(one=values.any_run)
async def test_any_run_is_read_as_it_was_added(store: SqlStore, one: Run) -> None:
    """A run with its steps, attempts and undos equals what was added."""
    one = values.renewed(one)
    await store.transact(lambda tx: tx.add_runs([one]))
    assert await store.transact(lambda tx: tx.run(one.id)) == one
    history = await store.record(one.id)
    assert history is not None
    assert replace(history.run, touched=()) == one


@any_values
@given(one=values.any_run, other=values.any_run, told_before=st.booleans())
async def test_any_change_of_a_run_is_saved(store: SqlStore, one: Run, other: Run, told_before: bool) -> None:
    """Changes of the run and its steps are kept, whether or not the previous state is passed."""
    one = values.renewed(one)
    changed = replace(
        one,
        status=other.status,
        decision=other.decision,
        ended_at=other.ended_at,
        acted_at=other.acted_at,
        waiting_on=other.waiting_on,
        message=other.message,
        steps=tuple(
            replace(new, phase=old.phase, index=old.index) for old, new in zip(one.steps, other.steps, strict=False)
        )
        + one.steps[len(other.steps) :],
    )
    await store.transact(lambda tx: tx.add_runs([one]))
    await store.transact(lambda tx: tx.save_runs([(changed, one if told_before else None)]))
    assert await store.transact(lambda tx: tx.run(one.id)) == changed


async def test_a_step_can_be_added_to_a_run_later(store: SqlStore) -> None:
    """Steps of ``on_failure`` may exist only once the run fails; they come after the others."""
    one = run()
    longer = replace(one, steps=(*one.steps, step(0, "on_failure"), step(1, "on_failure")))
    await keep(store, one)
    await store.transact(lambda tx: tx.save_runs([(longer, one)]))
    assert await store.transact(lambda tx: tx.run(one.id)) == longer


async def test_unknown_runs_are_omitted(store: SqlStore) -> None:
    """A query for several omits unknown ids; a query for one returns None."""
    one = closed()
    await keep(store, one)
    assert await store.transact(lambda tx: tx.runs(["unknown", one.id, one.id])) == [one]
    assert await store.transact(lambda tx: tx.run("unknown")) is None


async def test_unfinished_runs_are_open_or_have_a_pending_undo(store: SqlStore) -> None:
    """Open ones, and closed ones with an undo armed or running, oldest first; the rest is finished."""
    by_status = {status: step(undo=undo(status), status=StepStatus.SUCCEEDED) for status in UndoStatus}
    armed = closed(1, steps=(by_status[UndoStatus.ARMED],))
    undoing = closed(2, steps=(by_status[UndoStatus.RUNNING],))
    open_run, waiting = run(3), run(0, gpu(1), status=Status.WAITING)
    finished = [closed(4, steps=(by_status[status],)) for status in UndoStatus if not status.is_owed]
    await keep(store, open_run, undoing, armed, waiting, *finished, closed(5), not_started(6))
    assert await store.transact(lambda tx: tx.unfinished()) == [waiting, armed, undoing, open_run]


async def test_a_run_is_finished_once_its_last_undo_is_carried_out(store: SqlStore) -> None:
    """Saving the run with its undo done makes it finished."""
    one = closed(steps=(step(undo=undo(), status=StepStatus.SUCCEEDED),))
    await keep(store, one)
    done = replace(one, steps=(replace(one.steps[0], undo=undo(UndoStatus.DONE)),))
    await store.transact(lambda tx: tx.save_runs([(done, one)]))
    assert await store.transact(lambda tx: tx.unfinished()) == []


async def test_open_runs_are_found_by_playbook_and_target(store: SqlStore) -> None:
    """Only open ones of exactly that playbook and target are found."""
    first, other, ended = run(), run(playbook="other"), closed(target=gpu(2))
    await keep(store, first, other, ended)
    asked = [COOL, ("other", gpu().key), ("cool", gpu(2).key), ("cool", "cluster")]
    assert await store.transact(lambda tx: tx.open_runs_for(asked)) == {asked[0]: first.id, asked[1]: other.id}
    await store.transact(lambda tx: tx.save_runs([(replace(first, status=Status.CANCELLED, ended_at=at(2)), first)]))
    assert await store.transact(lambda tx: tx.open_runs_for([COOL])) == {}


async def test_a_command_leads_to_its_run(store: SqlStore) -> None:
    """It is found by the id of the last attempt of a step or an undo; an earlier attempt's id is no longer current."""
    tried = step(attempts=(values.attempt("c1", in_part=True), values.attempt("c2", 2)))
    undoing = step(1, undo=undo(UndoStatus.RUNNING, attempts=(values.attempt("u1"), values.attempt("u2", 2))))
    one = run(steps=(tried, undoing))
    await keep(store, one, run(target=gpu(1)))
    found = {
        command: await store.transact(lambda tx, command=command: tx.run_of_command(command))
        for command in ("c1", "c2", "u1", "u2", "unknown")
    }
    assert found == {"c1": None, "c2": one.id, "u1": None, "u2": one.id, "unknown": None}
    again = replace(one, steps=(replace(tried, attempts=(*tried.attempts, values.attempt("c3", 3))), undoing))
    await store.transact(lambda tx: tx.save_runs([(again, one)]))
    assert await store.transact(lambda tx: tx.run_of_command("c2")) is None
    assert await store.transact(lambda tx: tx.run_of_command("c3")) == one.id


# --- links ------------------------------------------------------------------------------------------


async def test_alerts_of_a_run_come_in_the_order_of_tying(store: SqlStore) -> None:
    """The order is not by time or name; an alert that is tied again keeps its place."""
    records = [heard("z"), heard("a", 3), heard("m", 1)]
    one, lonely = run(), run(target=gpu(1))

    def work(tx: Tx) -> None:
        tx.save_alerts(records)
        tx.add_runs([one, lonely])
        tx.link([(one.id, records[0].identity), (one.id, records[1].identity)])

    await store.transact(work)
    await store.transact(lambda tx: tx.link([(one.id, records[2].identity), (one.id, records[0].identity)]))
    assert await store.transact(lambda tx: tx.alerts_of([one.id, lonely.id, "unknown"])) == {one.id: records}


async def test_the_alerts_of_a_run_are_counted(store: SqlStore) -> None:
    """Alerts just tied in the same unit count; an alert tied twice counts once."""
    one, lonely = run(), run(target=gpu(1))

    def work(tx: Tx) -> dict[str, int]:
        tx.save_alerts([heard("a"), heard("b")])
        tx.add_runs([one, lonely])
        tx.link([(one.id, heard("a").identity)])
        assert tx.alert_counts([one.id]) == {one.id: 1}
        tx.link([(one.id, heard("a").identity), (one.id, heard("b").identity)])
        return tx.alert_counts([one.id, lonely.id, "unknown"])

    assert await store.transact(work) == {one.id: 2}
    assert await store.transact(lambda tx: tx.alert_counts([])) == {}


async def test_runs_of_an_alert_have_playbook_target_status_and_decision(store: SqlStore) -> None:
    """Runs and decisions not to start, in the order of tying; a run without a target has an empty key."""
    one = run()
    refused = not_started(1, Decision.TARGET_UNKNOWN, target=None)
    refused = replace(refused, target=None, playbook="other")
    await keep(store, one, refused)
    identity = heard().identity
    found = await store.transact(lambda tx: tx.linked_runs([identity, Identity("unknown", at(0))]))
    assert found == {
        identity: [
            LinkedRun(one.id, "cool", gpu().key, Status.RUNNING, Decision.STARTED),
            LinkedRun(refused.id, "other", "", Status.NOT_STARTED, Decision.TARGET_UNKNOWN, refused.ended_at),
        ]
    }
    await store.transact(lambda tx: tx.save_runs([(replace(one, status=Status.FAILED, ended_at=at(2)), one)]))
    found = await store.transact(lambda tx: tx.linked_runs([identity]))
    assert found[identity][0].status == "failed"


async def test_a_decision_of_a_later_release_hides_no_run_of_an_alert(store: SqlStore) -> None:
    """If a server of the previous release takes over again, the alert's next report is still accepted."""
    refused = not_started(2)
    await keep(store, refused)

    def as_written_later(tx: Tx) -> list[LinkedRun]:
        assert isinstance(tx, SqlTransaction)
        tx.link([(refused.id, heard().identity)])
        changed = sa.update(schema.runs).where(schema.runs.c.id == refused.id).values(decision="quarantined")
        tx.flushed_connection().execute(changed)
        return tx.linked_runs([heard().identity])[heard().identity]

    assert [(linked.run_id, linked.decision) for linked in await store.transact(as_written_later)] == [
        (refused.id, "quarantined")
    ]


async def test_tying_unknown_records_is_rejected(store: SqlStore) -> None:
    """A tie needs a stored run and a stored alert."""
    one = run()
    await keep(store, one)
    with pytest.raises(errors.Conflict):
        await store.transact(lambda tx: tx.link([(one.id, Identity("unknown", at(0)))]))
    with pytest.raises(errors.Conflict):
        await store.transact(lambda tx: tx.link([("unknown", heard().identity)]))


# --- guards -----------------------------------------------------------------------------------------


async def test_the_last_end_is_that_of_the_same_playbook_and_target(store: SqlStore) -> None:
    """This is the latest end of any run of this playbook on this target, observed ones included."""
    observed = closed(7, status=Status.OBSERVED, decision=Decision.OBSERVE_ONLY)
    await keep(store, closed(1), observed, closed(20, gpu(1)), closed(30, playbook="other"))
    facts = await store.transact(lambda tx: tx.guard_facts([COOL, ("cool", "cluster")], {}))
    assert facts[COOL].last_ended_at == at(8)
    assert facts["cool", "cluster"].last_ended_at is None


async def test_started_counts_the_playbooks_runs_on_any_target_after_the_moment(store: SqlStore) -> None:
    """The moment itself is excluded; a playbook without a moment is not counted."""
    await keep(store, closed(0), closed(10), closed(11, gpu(1)), run(12, gpu(2)), closed(13, playbook="other"))
    facts = await store.transact(lambda tx: tx.guard_facts([COOL, ("other", "cluster")], {"cool": at(10)}))
    assert facts[COOL].started == 2
    assert facts["other", "cluster"].started == 0


async def test_started_can_count_only_the_runs_on_the_target(store: SqlStore) -> None:
    """This applies to the named playbooks; a target without runs has none."""
    await keep(store, closed(0), closed(10), closed(11, gpu(1)), run(12), closed(13, gpu(1), playbook="other"))
    keys = [COOL, ("cool", "gpu:node-1/1"), ("cool", "cluster"), ("other", "cluster")]
    since = {"cool": at(10), "other": at(10)}
    facts = await store.transact(lambda tx: tx.guard_facts(keys, since, {"cool"}))
    assert [facts[key].started for key in keys] == [1, 1, 0, 1]


async def test_open_runs_are_counted_by_playbook(store: SqlStore) -> None:
    """They count on any target; the count decreases as they close."""
    one = run(0, gpu(1))
    await keep(store, one, run(1, gpu(2), status=Status.AWAITING_APPROVAL), closed(2), run(3, playbook="other"))
    assert (await store.transact(lambda tx: tx.guard_facts([COOL], {})))[COOL].open_runs == 2
    await store.transact(lambda tx: tx.save_runs([(replace(one, status=Status.FAILED, ended_at=at(4)), one)]))
    assert (await store.transact(lambda tx: tx.guard_facts([COOL], {})))[COOL].open_runs == 1


async def test_guard_facts_ignore_decisions_not_to_start(store: SqlStore) -> None:
    """They neither prolong a cooldown nor use up a rate limit."""
    await keep(store, not_started(5), not_started(6, Decision.STALE))
    facts = await store.transact(lambda tx: tx.guard_facts([COOL], {"cool": at(0)}))
    assert facts == {COOL: GuardFacts()}


async def test_nodes_acted_on_are_those_of_started_runs_since_the_moment(store: SqlStore) -> None:
    """Each node counts once; other decisions, older runs and targets without a node do not count."""
    await keep(
        store,
        closed(1, gpu(0, "old")),
        closed(10, gpu(0, "at the moment")),
        closed(11, gpu(0, "a")),
        run(12, gpu(1, "a")),
        run(12, Target(TargetKind.NODE, node="b")),
        run(13, Target(TargetKind.JOB, job="llm")),
        not_started(14, target=gpu(0, "refused")),
        closed(15, gpu(0, "seen"), status=Status.OBSERVED, decision=Decision.OBSERVE_ONLY),
    )
    assert await store.transact(lambda tx: tx.nodes_acted_on(at(10))) == {"a", "b"}
    assert await store.transact(lambda tx: tx.nodes_acted_on(at(11))) == {"a", "b"}
    assert await store.transact(lambda tx: tx.nodes_acted_on(at(0))) == {"old", "at the moment", "a", "b"}
    assert await store.transact(lambda tx: tx.nodes_acted_on(at(12))) == set()


async def test_nodes_at_work_are_those_of_open_runs_that_have_acted(store: SqlStore) -> None:
    """Targets and touched nodes; not of runs that wait, have closed, or only have a pending undo."""
    working = run(2, gpu(0, "a"), acted_at=at(2))
    job = run(3, Target(TargetKind.JOB, job="llm"), acted_at=at(3))
    over = closed(4, gpu(0, "over"), acted_at=at(4))
    await keep(store, working, job, over, run(5, gpu(0, "waits")))
    await store.transact(lambda tx: tx.touch_nodes(job.id, {"b", "c"}, at(4)))
    await store.transact(lambda tx: tx.touch_nodes(over.id, {"d"}, at(4)))
    assert await store.transact(lambda tx: tx.nodes_at_work()) == {"a", "b", "c"}
    ended = replace(working, status=Status.SUCCEEDED, ended_at=at(9))
    await store.transact(lambda tx: tx.save_runs([(ended, working)]))
    assert await store.transact(lambda tx: tx.nodes_at_work()) == {"b", "c"}


async def test_a_parents_check_is_stored_with_its_batch(store: SqlStore) -> None:
    """Its steps come before the final ones, whatever the order in which they are read."""
    group = Target.of_key("nodes:rack=r1")
    states = (step(0, "check"), step(1, "check"), step(0, "on_success"), step(0, "on_failure"))
    parent = run(2, group, steps=states)
    await keep(store, parent)
    checked = replace(parent.with_step(replace(states[1], status=StepStatus.SUCCEEDED)), batch=3)
    await store.transact(lambda tx: tx.save_runs([(checked, parent)]))
    record = await store.record(parent.id)
    assert record is not None
    assert record.run.batch == 3
    assert record.run.steps == checked.steps


async def test_a_run_that_ends_as_not_started_no_longer_counts_as_acting(store: SqlStore) -> None:
    """A run that waited for its target until its alert was stale acted on no node."""
    one = run(5)
    await keep(store, one)
    assert await store.transact(lambda tx: tx.nodes_acted_on(at(0))) == {"node-1"}
    refused = replace(one, status=Status.NOT_STARTED, decision=Decision.TARGET_BUSY, ended_at=at(20))
    await store.transact(lambda tx: tx.save_runs([(refused, one)]))
    assert await store.transact(lambda tx: tx.nodes_acted_on(at(0))) == set()
    facts = await store.transact(lambda tx: tx.guard_facts([COOL], {"cool": at(0)}))
    assert facts == {COOL: GuardFacts()}


async def test_nodes_touched_by_a_run_count_from_when_it_touches_them(store: SqlStore) -> None:
    """They count in addition to its target's, within the unit and after it, and after a rolled back unit."""
    one, other = run(1, Target(TargetKind.JOB, job="llm")), run(2, gpu(0, "own"), acted_at=at(2))
    await keep(store, one, other)

    def touch(tx: Tx) -> set[str]:
        tx.touch_nodes(one.id, ["a", "b"], at(3))
        return tx.nodes_acted_on(at(1))

    def touch_in_vain(tx: Tx) -> None:
        tx.touch_nodes(one.id, ["never"], at(9))
        raise LookupError

    assert await store.transact(lambda tx: tx.nodes_acted_on(at(1))) == {"own"}
    assert await store.transact(touch) == {"own", "a", "b"}
    with pytest.raises(LookupError):
        await store.transact(touch_in_vain)
    await store.transact(lambda tx: tx.touch_nodes(one.id, ["b", "c"], at(5)))
    assert await store.transact(lambda tx: tx.nodes_acted_on(at(3))) == {"b", "c"}
    assert await store.transact(lambda tx: tx.touched_nodes(one.id)) == {"a", "b", "c"}
    assert await store.transact(lambda tx: tx.touched_nodes(other.id)) == set()
    newest_first, _ = await store.page(HistoryFilter(), 10, None)
    assert [entry.touched for entry in newest_first] == [("own",), ("a", "b", "c")]


async def test_time_gaps_are_kept_in_order_until_they_are_old(store: SqlStore) -> None:
    """They are visible in the unit that adds them, and after it."""
    long_ago = TimeGap(at(-1000), timedelta(days=100, microseconds=1), is_downtime=True)
    lately, early = TimeGap(at(90), timedelta(hours=2), False), TimeGap(at(60), timedelta(minutes=2), True)

    def add(tx: Tx) -> list[TimeGap]:
        tx.add_time_gaps([lately])
        tx.add_time_gaps([early])
        return tx.time_gaps()

    await store.transact(lambda tx: tx.add_time_gaps([long_ago]))
    assert await store.transact(add) == [long_ago, lately, early]
    await store.prune(at(50))
    assert await store.transact(lambda tx: tx.time_gaps()) == [lately, early]


async def test_the_outcome_of_jobs_is_remembered_until_it_is_deleted(store: SqlStore) -> None:
    """The last record of each job counts, also within one unit."""
    first = JobLife("llm-1", LifeState.PRESENT, at(1), "an instance")
    gone = replace(first, state=LifeState.GONE, since=at(2), reason="Grund: ünklar", failures=3, numbers={"a": 7})
    other = JobLife("llm-2", LifeState.ENDED, at(3))

    def work(tx: Tx) -> list[JobLife]:
        tx.save_job_lives([first, other])
        tx.save_job_lives([gone])
        return tx.job_lives()

    by_name = {life.name: life for life in await store.transact(work)}
    assert by_name == {"llm-1": gone, "llm-2": other}
    await store.transact(lambda tx: tx.forget_job_lives(["llm-2", "nobody"]))
    assert await store.transact(lambda tx: tx.job_lives()) == [gone]


async def test_alerts_from_the_future_are_set_back(store: SqlStore) -> None:
    """This applies to firing alerts, also in the same unit; others keep their times."""
    ahead, earlier = heard("ahead", last_heard_at=at(500)), heard("earlier", last_heard_at=at(5))
    resolved = heard("resolved", last_heard_at=at(500), resolved_at=at(500), resolved_because="alertmanager")

    def work(tx: Tx) -> None:
        tx.save_alerts([ahead, earlier, resolved])
        tx.limit_last_reports(at(10))

    await store.transact(work)
    identities = [record.identity for record in (ahead, earlier, resolved)]
    records = await store.transact(lambda tx: tx.alerts(identities))
    assert [records[identity].last_heard_at for identity in identities] == [at(10), at(5), at(500)]


async def test_nodes_are_remembered(store: SqlStore) -> None:
    """Each name is stored once, however often it is noted."""
    await store.transact(lambda tx: tx.remember_nodes(["a", "b"], at(0)))
    assert await store.transact(lambda tx: tx.known_nodes()) == {"a", "b"}
    await store.transact(lambda tx: tx.remember_nodes(["b", "c"], at(1)))
    assert await store.transact(lambda tx: tx.known_nodes()) == {"a", "b", "c"}


# --- orders, events, controls, playbooks ------------------------------------------------------------


async def test_operator_commands_of_a_run_come_in_the_order_of_issue(store: SqlStore) -> None:
    """Each has all its details; runs without any are omitted."""
    one, other = run(), run(target=gpu(1))
    await keep(store, one, other)
    orders = [
        OperatorOrder("o2", one.id, OrderKind.APPROVE, "kim", at(5), "go ahead", "ask", 2),
        OperatorOrder("o1", one.id, OrderKind.UNDO, "lee", at(4)),
    ]
    for order in orders:
        await store.transact(lambda tx, order=order: tx.add_order(order))
    assert await store.transact(lambda tx: tx.orders_of([one.id, other.id])) == {one.id: orders}
    with pytest.raises(errors.Conflict):
        await store.transact(lambda tx: tx.add_order(replace(orders[0], id="o3", run_id="unknown")))


@any_values
@given(event=values.any_event)
async def test_any_event_is_read_as_it_was_written(store: SqlStore, event: Event) -> None:
    """It has the number that the store assigned."""
    last = await store.last_seq()
    await store.transact(lambda tx: tx.append([event]))
    [kept] = await store.events_after(last, 10)
    assert kept == replace(event, seq=kept.seq)
    assert kept.seq == await store.last_seq() > last


async def test_controls_outlive_the_unit(store: SqlStore) -> None:
    """They start with their defaults and are replaced as a whole."""
    assert await store.transact(lambda tx: tx.controls()) == Controls()
    wanted = Controls(True, "kim", at(1), True, at(2), "too many nodes", at(3), breaker_closed_at=at(4))
    await store.transact(lambda tx: tx.save_controls(wanted))
    assert await store.transact(lambda tx: tx.controls()) == wanted


async def test_a_playbooks_text_is_stored_by_version(store: SqlStore) -> None:
    """Once stored, a version's text never changes."""
    await store.transact(lambda tx: tx.keep_playbook("cool", "v1", "one", at(0)))
    await store.transact(lambda tx: tx.keep_playbook("cool", "v1", "other", at(1)))
    await store.transact(lambda tx: tx.keep_playbook("cool", "v2", "two", at(1)))
    assert await store.transact(lambda tx: tx.playbook_text("cool", "v1")) == "one"
    assert await store.transact(lambda tx: tx.playbook_text("cool", "v2")) == "two"
    assert await store.transact(lambda tx: tx.playbook_text("cool", "v3")) is None


# --- pruning ----------------------------------------------------------------------------------------


async def test_prune_deletes_only_what_is_old_and_finished(store: SqlStore) -> None:
    """Open runs and pending undos keep their alerts and events, however old; recent runs stay too."""
    records = {name: heard(name) for name in ("old", "open", "owing", "recent", "untied", "heard")}
    records["recent"] = heard("recent", 100)
    records["heard"] = heard("heard", 0, last_heard_at=at(100))
    armed = step(undo=undo(), status=StepStatus.SUCCEEDED)
    runs = {
        "old": closed(1),
        "open": run(2, gpu(2)),
        "owing": closed(3, gpu(3), steps=(armed,)),
        "recent": closed(100, gpu(4)),
    }

    def work(tx: Tx) -> None:
        tx.save_alerts(list(records.values()))
        tx.add_runs(list(runs.values()))
        for name, one in runs.items():
            tx.link([(one.id, records[name].identity)])
            tx.append([event(name, one.id, 1)])
            tx.add_order(OperatorOrder(f"order of {name}", one.id, OrderKind.CANCEL, "kim", at(1)))
        tx.append([event("server, long ago", minute=1), event("server, lately", minute=100)])
        tx.remember_nodes(["gone"], at(-3000))
        tx.remember_nodes(["here"], at(90))
        tx.touch_nodes(runs["old"].id, ["gone"], at(1))

    await store.transact(work)
    assert await store.prune(at(50)) == 1

    def look(tx: Tx) -> None:
        ids = [one.id for one in runs.values()]
        assert tx.runs(ids) == [runs["open"], runs["owing"], runs["recent"]]
        assert len(tx.orders_of(ids)) == 3
        identities = [record.identity for record in records.values()]
        assert {identity.fingerprint for identity in tx.alerts(identities)} == {"open", "owing", "recent", "heard"}
        assert tx.known_nodes() == {"here"}

    await store.transact(look)
    kinds = [one.kind for one in await store.events_after(0, 100)]
    assert kinds == ["open", "owing", "recent", "server, lately"]
    assert await store.record(runs["old"].id) is None


async def test_prune_handles_any_number_while_other_calls_are_served(store: SqlStore) -> None:
    """A large backlog is deleted in batches; event numbers are not reused afterwards."""
    await keep(store, *(closed(number / 1000, gpu(number)) for number in range(1000)))
    await store.transact(lambda tx: tx.append([event(minute=1) for _ in range(500)]))
    last = await store.last_seq()
    pruned, _ = await asyncio.gather(
        store.prune(at(50)), store.transact(lambda tx: tx.append([event("meanwhile", minute=60)]))
    )
    assert pruned == 1000
    assert await store.prune(at(50)) == 0
    await store.transact(lambda tx: tx.append([event("later", minute=61)]))
    kept = await store.events_after(0, 10)
    assert [(one.kind, one.seq) for one in kept] == [("meanwhile", last + 1), ("later", last + 2)]


async def test_a_run_is_found_in_memory_by_what_it_changed(store: SqlStore) -> None:
    """It is found by target and time window; the memory that a run was given is stored with it."""
    first = run(acted_at=at(1), status=Status.FAILED, ended_at=at(2), message="no")
    others = [
        run(created_at=at(3), status=Status.SUCCEEDED),
        run(target=gpu(1), acted_at=at(4), status=Status.SUCCEEDED),
    ]
    await store.transact(lambda tx: tx.add_runs([first, *others]))
    windows = {"1h": at(0), "5m": at(1)}

    def read(tx: Tx) -> dict[str, RunMemory]:
        return tx.memories(first.playbook, [gpu(0).key, gpu(1).key, gpu(2).key], windows)

    found = await store.transact(read)
    assert found[gpu(0).key].counts == {"1h": 1, "5m": 0}
    assert found[gpu(0).key].last == LastRun(first.id, "failed", at(1), at(2), "no")
    assert found[gpu(1).key].counts == {"1h": 1, "5m": 1}
    assert found[gpu(2).key] == RunMemory({"1h": 0, "5m": 0})
    later = run(created_at=at(9), memory=found[gpu(0).key])
    await store.transact(lambda tx: tx.add_runs([later]))
    assert (await store.transact(lambda tx: tx.run(later.id))) == later


async def test_a_refusal_that_runs_steps_is_found_within_its_time(store: SqlStore) -> None:
    """Plain refusals and those of other playbooks are not."""
    refusal: dict[str, Any] = {"status": Status.NOT_STARTED, "decision": Decision.RATE_LIMITED}
    told = run(1, steps=(step(phase="on_limited"),), **refusal)
    plain = run(2, target=gpu(1), steps=(), **refusal)
    started = run(3, target=gpu(2), status=Status.SUCCEEDED)
    await store.transact(lambda tx: tx.add_runs([told, plain, started]))
    assert await store.transact(lambda tx: tx.limited_since("cool", at(0))) == {told.target_key}
    assert await store.transact(lambda tx: tx.limited_since("cool", at(1))) == set()
    assert await store.transact(lambda tx: tx.limited_since("other", at(0))) == set()
    assert (await store.transact(lambda tx: tx.run(told.id))) == told


async def test_the_runs_of_an_alert_have_their_end_and_reason_for_starting(store: SqlStore) -> None:
    """From this, further runs become due; runs that users started are not further runs."""
    first = run(1, status=Status.FAILED, ended_at=at(2))
    again = run(3, status=Status.SUCCEEDED, ended_at=at(4), repeats=first.id)
    by_hand = run(5, repeats=first.id, started_by="ann")

    def work(tx: Tx) -> None:
        tx.save_alerts([heard()])
        tx.add_runs([first, again, by_hand])
        tx.link([(each.id, heard().identity) for each in (first, again, by_hand)])

    await store.transact(work)
    linked = (await store.transact(lambda tx: tx.linked_runs([heard().identity])))[heard().identity]
    assert [(each.ended_at, bool(each.is_again)) for each in linked] == [(at(2), False), (at(4), True), (None, False)]
