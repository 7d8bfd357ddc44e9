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
from trainmedic_server.engine.undoing import KEPT_ATTEMPTS

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


async def test_an_undo_is_about_the_attempt_that_may_have_been_applied(world: MakeWorld) -> None:
    """A later one under another id, which was certainly refused, does not take its place."""
    w = world(RETRYING)
    w.actions["cap"].outcomes += [errors.OutcomeUnknown("no reply"), errors.TemporaryFailure("interrupted")]
    w.actions["cap"].outcomes += [errors.PermanentFailure("below the floor")]
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.pass_time(120)
    first, again, other = (call.command_id for call in w.actions["cap"].calls)
    assert first == again != other
    await w.resolve(alert)
    assert [call.undo_of for call in w.actions["uncap"].calls] == [first]


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


@pytest.mark.parametrize("reason", ["the command's signature is wrong", "does not support the command"])
async def test_an_undo_that_is_refused_stays_owed_until_it_is_carried_out(world: MakeWorld, reason: str) -> None:
    """A job gets the right key, an agent a policy that allows it again: a refusal today is none for ever."""
    w = world(CAP)
    w.actions["uncap"].outcomes += [errors.PermanentFailure(reason)] * 5
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    await w.resolve(alert)
    run = await w.run()
    undo = run.steps[0].undo
    assert undo is not None
    assert (undo.status, undo.error, run.owes_undo) == (UndoStatus.RUNNING, reason, True)
    assert undo.retry_at is not None
    gauges = ("trainmedic_undos_owed", "trainmedic_undos_delayed")
    assert [w.metrics.registry.get_sample_value(name) for name in gauges] == [1, 1]
    await w.pass_time(120)
    assert (await w.run()).steps[0].undo.status is UndoStatus.DONE  # type: ignore[union-attr]
    assert len({call.command_id for call in w.actions["uncap"].calls}) == 6  # none is answered from memory
    assert [w.metrics.registry.get_sample_value(name) for name in gauges] == [0, 0]


async def test_an_undo_that_never_succeeds_is_tried_for_days_and_its_record_stays_small(world: MakeWorld) -> None:
    """Every five minutes for about a day, then every hour; over restarts too. The story has each reason once."""
    w = world(CAP)
    w.actions["uncap"].outcomes += [errors.PermanentFailure("not here")] * 2000
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    await w.resolve(alert)
    await w.pass_time(24 * 3600)
    first_day = w.calls()["uncap"]
    assert 250 < first_day < 320
    await w.restart(after=3600)
    await w.pass_time(2 * 24 * 3600)
    assert 2 * 24 <= w.calls()["uncap"] - first_day < 5 * 24
    run = await w.run()
    undo = run.steps[0].undo
    assert undo is not None
    assert (undo.status, len(undo.attempts), undo.attempts[0].number) == (UndoStatus.RUNNING, KEPT_ATTEMPTS, 1)
    assert undo.attempts[-1].number == w.calls()["uncap"]
    assert (await w.story()).count("undo_delayed") == 1
    w.actions["uncap"].outcomes.clear()
    await w.pass_time(3700)
    assert not (await w.run()).owes_undo


async def test_an_undo_that_is_refused_can_be_ordered_at_once(world: MakeWorld) -> None:
    """For each order one attempt; the order and who gave it are in the run's story."""
    w = world(CAP)
    w.actions["uncap"].outcomes += [errors.PermanentFailure("not here")] * 10
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    await w.resolve(alert)
    await w.pass_time(600)
    run = await w.run()
    for _ in range(2):
        before = w.calls()["uncap"]
        await w.engine.order(run.id, OrderKind.UNDO, "alice", "agent is back")
        await w.pass_time(1)
        assert w.calls()["uncap"] == before + 1
    assert (await w.run()).steps[0].undo.status is UndoStatus.DONE  # type: ignore[union-attr]
    record = await w.store.record(run.id)
    assert record is not None
    ordered = [(event.actor, event.data["note"]) for event in record.events if event.kind == "undo_ordered"]
    assert ordered == [("alice", "agent is back")] * 2


async def test_a_person_closes_an_undo_that_cannot_be_certain(world: MakeWorld) -> None:
    """With a note, which the story keeps; it is tried no more, also after a restart, until a person orders it."""
    w = world(CAP)
    w.actions["uncap"].outcomes += [errors.TemporaryFailure("it does not know the command")] * 500
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    await w.resolve(alert)
    await w.pass_time(60)
    run = await w.engine.order((await w.run()).id, OrderKind.CLOSE_UNDO, "alice", "the card was replaced")
    assert not run.owes_undo
    undo = run.steps[0].undo
    assert undo is not None
    assert (undo.status, undo.because) == (UndoStatus.CLOSED, "closed by alice: the card was replaced")
    tried = w.calls()["uncap"]
    await w.restart(after=5)
    await w.pass_time(86400)
    assert w.calls()["uncap"] == tried
    record = await w.store.record(run.id)
    assert record is not None
    [closed] = [event for event in record.events if event.kind == "undo_closed"]
    assert (closed.actor, closed.data["note"]) == ("alice", "the card was replaced")
    with pytest.raises(errors.Conflict, match="has no pending undo"):
        await w.engine.order(run.id, OrderKind.CLOSE_UNDO, "bob", "me too")
    w.actions["uncap"].outcomes.clear()
    await w.engine.order(run.id, OrderKind.UNDO, "bob")
    await w.pass_time(1)
    assert (await w.run()).steps[0].undo.status is UndoStatus.DONE  # type: ignore[union-attr]
    with pytest.raises(errors.Conflict, match="is undone already"):
        await w.engine.order(run.id, OrderKind.UNDO, "bob")


async def test_an_undo_in_flight_is_closed_only_if_it_does_not_succeed(world: MakeWorld) -> None:
    """What was taken back is recorded as that, whoever wanted to close it meanwhile."""
    w = world(CAP)
    w.actions["uncap"].outcomes += [timedelta(seconds=10)]
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    await w.resolve(alert)
    await w.engine.order((await w.run()).id, OrderKind.CLOSE_UNDO, "alice", "enough")
    assert (await w.run()).steps[0].undo.status is UndoStatus.RUNNING  # type: ignore[union-attr]
    await w.pass_time(11)
    assert (await w.run()).steps[0].undo.status is UndoStatus.DONE  # type: ignore[union-attr]


async def test_an_undo_that_has_not_begun_can_be_closed_and_one_of_an_open_run_cannot(world: MakeWorld) -> None:
    """A job that is gone for good, while its alert fires on; of an open run nobody knows yet what it will owe."""
    w = world(CAP.replace("undo: on_resolve", "undo: on_resolve\n  - {id: gone, wait_for: resolved, timeout: 1h}"))
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    run = await w.run()
    with pytest.raises(errors.Conflict, match="is open"):
        await w.engine.order(run.id, OrderKind.CLOSE_UNDO, "alice", "gone")
    await w.pass_time(3700)
    assert (await w.run()).owes_undo
    closed = await w.engine.order(run.id, OrderKind.CLOSE_UNDO, "alice", "gone")
    assert not closed.owes_undo, "the answer is how the run stands then, though no driver had it"
    await w.resolve(alert)
    await w.pass_time(60)
    assert w.calls() == {"cap": 1}
    assert not (await w.run()).owes_undo


async def test_an_undo_is_told_whether_what_it_takes_back_is_on_record_as_applied(world: MakeWorld) -> None:
    """By that an action judges a receiver which says that there is nothing to undo."""
    for outcome, is_applied in (({}, True), (errors.OutcomeUnknown("no reply"), False)):
        w = world(CAP)
        w.actions["cap"].outcomes.append(outcome)
        alert = w.alert(gpu="0", node="n1")
        await w.post(alert)
        await w.resolve(alert)
        assert [call.undoes_applied for call in w.actions["uncap"].calls] == [is_applied]


async def test_a_clock_that_is_set_back_does_not_make_an_undo_run_without_end(world: MakeWorld) -> None:
    """One order, one attempt, whatever the time says; what else there is are its retries."""
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
    assert w.calls()["uncap"] < 12


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
