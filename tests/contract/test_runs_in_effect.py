"""`ports.Transaction`: which runs may have something in effect that has to be kept up."""

from __future__ import annotations

from msgspec.structs import replace

from tests.contract.run_store_values import at, attempt, closed, event, gpu, heard, run, step, undo
from trainmedic_server.adapters.sql_store.store import SqlStore
from trainmedic_server.domain.run import Run, StepStatus, UndoStatus
from trainmedic_server.ports.store import Transaction

Tx = Transaction

CAP = "gpu.power_limit"
BEGUN = step(status=StepStatus.SUCCEEDED, attempts=(attempt("c1", status="applied"),))


async def found(store: SqlStore, *actions: str) -> set[str]:
    def work(tx: Tx) -> set[str]:
        return {one.playbook for one in tx.runs(tx.runs_in_effect(actions or (CAP,)))}

    return await store.transact(work)


async def test_runs_in_effect_are_open_have_a_pending_undo_or_a_firing_alert(store: SqlStore) -> None:
    """A closed run without a pending undo whose alerts have resolved is not among them."""
    kept = {
        "open": (run(0, gpu(1), steps=(BEGUN,)), heard("a", resolved_at=at(1))),
        "owing": (
            closed(1, gpu(2), steps=(step(undo=undo(), attempts=(attempt("c2"),)),)),
            heard("b", resolved_at=at(1)),
        ),
        "firing": (closed(2, gpu(3), steps=(BEGUN,)), heard("c", last_heard_at=at(30))),
        "resolved": (closed(4, gpu(5), steps=(BEGUN,)), heard("e", last_heard_at=at(30), resolved_at=at(31))),
    }

    def work(tx: Tx) -> None:
        for name, (one, record) in kept.items():
            tx.save_alerts([record])
            tx.add_runs([_named(one, name)])
            tx.link([(one.id, record.identity)])

    await store.transact(work)
    assert await found(store) == {"open", "owing", "firing"}


async def test_runs_in_effect_have_started_a_step_of_such_an_action(store: SqlStore) -> None:
    """Steps of other actions and untried steps do not count."""
    undone = step(1, attempts=(attempt("c3"),), undo=undo(UndoStatus.DONE))
    runs = [
        _named(run(0, gpu(1), steps=(step(),)), "pending"),
        _named(run(1, gpu(2), steps=(step(action="disk.clean", attempts=(attempt("c2"),)),)), "another"),
        _named(run(2, gpu(3), steps=(step(), undone)), "second"),
    ]
    await store.transact(lambda tx: tx.add_runs(runs))
    assert await found(store) == {"second"}
    assert await found(store, "disk.clean", CAP) == {"another", "second"}


async def test_runs_in_effect_sees_its_own_units_writes(store: SqlStore) -> None:
    """These are writes of runs, alerts and ties."""

    def work(tx: Tx) -> tuple[int, int]:
        one, two = closed(0, gpu(1), steps=(BEGUN,)), run(1, gpu(2), steps=(BEGUN,))
        tx.add_runs([one, two])
        tx.save_alerts([heard()])
        first = len(tx.runs_in_effect([CAP]))
        tx.link([(one.id, heard().identity)])
        return first, len(tx.runs_in_effect([CAP]))

    assert await store.transact(work) == (1, 2)


async def test_events_of_a_run_are_found_by_their_kind(store: SqlStore) -> None:
    """In order and with those that the unit itself has just written, but without those of other runs."""
    one, other = run(0, gpu(1)), run(1, gpu(2))

    def work(tx: Tx) -> list[object]:
        tx.add_runs([one, other])
        tx.append([event("lease_lost", one.id, place="n1"), event("started", one.id), event("lease_lost", other.id)])
        return [kept.data for kept in tx.events_of(one.id, "lease_lost")]

    assert await store.transact(work) == [{"place": "n1"}]
    await store.transact(lambda tx: tx.append([event("lease_lost", one.id, place="n2")]))
    kept = await store.transact(lambda tx: tx.events_of(one.id, "lease_lost"))
    assert [event.data["place"] for event in kept] == ["n1", "n2"]


def _named(one: Run, name: str) -> Run:
    return replace(one, playbook=name)


async def test_losses_are_read_for_many_runs_in_order(store: SqlStore) -> None:
    """With reapplications, and nothing else; for more runs than one statement takes."""
    runs = [closed(number, gpu(number)) for number in range(300)]

    def write(tx: Tx) -> None:
        tx.add_runs(runs)
        for one in runs[::299]:
            tx.append([event("lease_lost", one.id, place="n1"), event("started", one.id)])
            tx.append([event("set_again_done", one.id), event("lease_lost", one.id, place="n2")])

    await store.transact(write)
    losses = await store.losses_of_runs([one.id for one in runs])
    kinds = ["lease_lost", "set_again_done", "lease_lost"]
    assert {run_id: [each.kind for each in listed] for run_id, listed in losses.items()} == {
        one.id: kinds for one in runs[::299]
    }
    assert await store.losses_of_runs([]) == {}
