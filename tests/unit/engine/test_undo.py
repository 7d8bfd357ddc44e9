"""Undo: a duty that nothing holds back, carried out once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.unit.engine.books import CAP
from tests.unit.engine.test_runs import RETRYING
from tests.unit.engine.world import World
from trainmedic_server import errors
from trainmedic_server.domain.run import OrderKind, Status, UndoStatus

MakeWorld = Callable[..., World]


async def test_an_undo_does_not_wait_for_a_later_run_that_holds_the_target(world: MakeWorld) -> None:
    """It waits for the attempt in flight there, and no longer."""
    later = """
playbook: later
on: {alert: Later}
target: {gpu: "{{ labels.gpu }}", node: "{{ labels.node }}"}
steps:
  - {id: act, action: test.other}
  - {id: gone, wait_for: resolved}
"""
    w = world(CAP, later)
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    w.actions["other"].outcomes.append(timedelta(seconds=10))
    await w.post(w.alert("Later", gpu="0", node="n1"))
    await w.resolve(alert)
    await w.pass_time(5)
    assert w.calls() == {"cap": 1, "other": 1}
    await w.pass_time(6)
    assert w.calls() == {"cap": 1, "other": 1, "uncap": 1}
    assert (await w.runs())[-1].status is Status.WAITING


async def test_an_attempt_that_waited_for_an_undo_has_its_whole_time(world: MakeWorld) -> None:
    """It is not given up for time that passed before it could be made."""
    w = world(RETRYING.replace("retry: {attempts: 3, delay: 2s, backoff: 2}", "retry: {attempts: 1}"))
    first = w.alert(node="n1")
    await w.post(first)
    w.actions["uncap"].outcomes.append(timedelta(seconds=29))
    await w.resolve(first)
    await w.pass_time(1)
    w.actions["cap"].outcomes.append(timedelta(seconds=15))
    await w.post(w.alert(node="n1"))
    await w.pass_time(60)
    call = w.actions["cap"].calls[1]
    assert call.deadline - call.issued_at == timedelta(seconds=28 + 20)
    assert (await w.runs())[-1].status is Status.SUCCEEDED


@pytest.mark.parametrize("then", ["rejected", "failed"])
async def test_a_failure_after_an_unknown_outcome_does_not_prove_that_nothing_was_applied(
    world: MakeWorld, then: str
) -> None:
    """The first attempt may have been; so its undo stays owed."""
    failure = errors.PermanentFailure("no") if then == "rejected" else errors.TemporaryFailure("busy")
    w = world(RETRYING.replace("attempts: 3", "attempts: 2"))
    w.actions["cap"].outcomes += [errors.OutcomeUnknown("no reply"), failure]
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.pass_time(60)
    assert (await w.run()).status is Status.FAILED
    await w.resolve(alert)
    assert w.calls() == {"cap": 2, "uncap": 1}


async def test_undo_ordered_again_while_it_is_being_retried_is_tried_at_once(world: MakeWorld) -> None:
    """Whoever has repaired the agent need not wait out the backoff; and one order is one attempt."""
    w = world(CAP)
    w.actions["uncap"].outcomes += [errors.TemporaryFailure("away")] * 20
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    await w.resolve(alert)
    await w.pass_time(600)
    before = w.calls()["uncap"]
    run = await w.run()
    await w.engine.order(run.id, OrderKind.UNDO, "alice")
    await w.pass_time(0)
    assert w.calls()["uncap"] == before + 1
    await w.engine.order(run.id, OrderKind.UNDO, "alice")
    await w.pass_time(0)
    assert w.calls()["uncap"] == before + 2


async def test_an_undo_that_is_refused_is_on_record_and_can_be_ordered_again(world: MakeWorld) -> None:
    """For each order one attempt; the order and who gave it are in the run's story."""
    w = world(CAP)
    w.actions["uncap"].outcomes += [errors.PermanentFailure("not here")] * 2
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    await w.resolve(alert)
    run = await w.run()
    assert run.steps[0].undo.status is UndoStatus.FAILED  # type: ignore[union-attr]
    for expected in (UndoStatus.FAILED, UndoStatus.DONE):
        await w.engine.order(run.id, OrderKind.UNDO, "alice", "agent is back")
        await w.pass_time(60)
        assert (await w.run()).steps[0].undo.status is expected  # type: ignore[union-attr]
    assert w.calls()["uncap"] == 3
    record = await w.store.record(run.id)
    assert record is not None
    ordered = [(event.actor, event.data["note"]) for event in record.events if event.kind == "undo_ordered"]
    assert ordered == [("alice", "agent is back")] * 2


async def test_a_clock_that_is_set_back_does_not_make_an_undo_run_without_end(world: MakeWorld) -> None:
    """One order, one attempt, whatever the time says."""
    w = world(CAP)
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    w.actions["uncap"].outcomes += [errors.PermanentFailure("not here")] * 50
    ordered_at = w.clock.now()
    w.clock.set_back(timedelta(hours=-1))
    await w.engine.order((await w.run()).id, OrderKind.UNDO, "alice")
    assert w.clock.now() > ordered_at
    w.clock.set_back(timedelta(hours=2))
    await w.pass_time(600)
    assert w.calls() == {"cap": 1, "uncap": 1}


async def test_an_undo_in_flight_at_a_kill_is_resumed_on_record(world: MakeWorld) -> None:
    """Under its own command id, and the story says so."""
    w = world(CAP)
    w.actions["uncap"].outcomes.append("hang")
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    await w.resolve(alert)
    await w.restart(after=5)
    first, second = w.actions["uncap"].calls
    assert (first.command_id, second.resumed) == (second.command_id, True)
    assert (await w.story())[-3:] == ["undo_started", "undo_resumed", "undo_done"]


async def test_an_alert_that_resolves_while_an_attempt_is_in_flight_is_undone_after_it(world: MakeWorld) -> None:
    """Not before: what is not applied yet cannot be taken back."""
    w = world(CAP)
    w.actions["cap"].outcomes.append(timedelta(seconds=10))
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    await w.resolve(alert)
    await w.pass_time(5)
    assert w.calls() == {"cap": 1}
    await w.pass_time(6)
    assert w.calls() == {"cap": 1, "uncap": 1}


async def test_an_undo_waits_for_every_alert_that_joined(world: MakeWorld) -> None:
    """Also for one whose silence is longer than that of the first: each is assumed resolved in its own time."""
    watch = """
playbook: watch
on: {alert: [Hot, Hotter]}
target: node
steps:
  - {id: cap, action: test.cap, undo: on_resolve}
  - {id: gone, wait_for: resolved, timeout: 1m, on_timeout: continue}
"""
    w = world(watch)
    await w.engine.start()
    await w.post(w.alert("Hot", node="n1"))
    await w.pass_time(30)
    joined = w.alert("Hotter", node="n1")
    await w.post(joined)
    await w.pass_time(6 * 3600)
    await w.post(joined)
    await w.pass_time(7 * 3600)
    assert w.calls() == {"cap": 1}
    await w.pass_time(6 * 3600)
    assert w.calls() == {"cap": 1, "uncap": 1}
