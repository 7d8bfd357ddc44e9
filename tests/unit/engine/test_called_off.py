"""What comes between the record of an attempt and its act: the attempt is called off, and nothing of it stays owed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.unit.engine.held_commits import hold_next
from tests.unit.engine.test_breaker import Remote
from tests.unit.engine.test_runs import RETRYING
from tests.unit.engine.world import World
from trainmedic_server import errors
from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.run import Decision, OrderKind, Run, Status, StepStatus
from trainmedic_server.engine.driver import Driver
from trainmedic_server.engine.recorder import Recorder, RunSnapshot
from trainmedic_server.engine.workers import Workers

MakeWorld = Callable[..., World]

ELSEWHERE = """
playbook: elsewhere
on: {alert: Hot}
target: node
steps:
  - {id: act, action: test.remote, with: {on: [n8, n9]}}
"""


async def _paused_while_admitted(w: World, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Post an alert, and pause the server while the commit of its run and first attempt is under way."""
    (commit,) = hold_next(w, monkeypatch)
    posting = asyncio.create_task(w.post(w.alert(node="n1")))
    await commit.is_durable.wait()
    await w.engine.pause("alice")
    commit.is_known.set()
    await posting
    return await w.run()


def _is_as_if_nothing_was_begun(run: Run) -> bool:
    (step,) = run.steps
    return (step.attempts, step.undo, run.acted_at, run.owes_undo) == ((), None, None, False)


async def test_a_run_that_is_paused_while_it_is_admitted_has_begun_nothing(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its attempt was on record, and was not made: once it is resumed it is made as a new one."""
    w = world(RETRYING)
    run = await _paused_while_admitted(w, monkeypatch)
    assert (run.status, run.waiting_on, run.steps[0].status) == (Status.WAITING, "resume", StepStatus.PENDING)
    assert _is_as_if_nothing_was_begun(run)
    await w.engine.resume("alice")
    await w.pass_time(0)
    assert [call.resumed for call in w.actions["cap"].calls] == [False]
    told = ["started", "step_started", "attempt_called_off", "waiting_for_resume"]
    assert await w.story() == [*told, "step_started", "step_succeeded", "closed"]


@pytest.mark.parametrize("ending", ["cancel", "resolve", "wait"])
async def test_what_ends_such_a_run_finds_nothing_that_may_have_been_applied(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """A person, the end of the alert, or a pause that was too long."""
    w = world(RETRYING)
    run = await _paused_while_admitted(w, monkeypatch)
    if ending == "cancel":
        await w.engine.order(run.id, OrderKind.CANCEL, "bob")
    elif ending == "resolve":
        await w.resolve(w.alert(node="n1"))
    else:
        await w.pass_time(3600)
    await w.engine.resume("alice")
    await w.pass_time(0)
    run = await w.run()
    ended = (Status.CANCELLED, Decision.STARTED) if ending == "cancel" else (Status.NOT_STARTED, Decision.STALE)
    assert (run.status, run.decision) == ended
    assert _is_as_if_nothing_was_begun(run)
    assert w.calls() == {}


async def test_a_retry_that_is_called_off_leaves_what_the_attempts_before_it_have_done(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outcome of the first is unknown, so its undo is owed, and the attempt that follows has its id again."""
    w = world(RETRYING)
    w.actions["cap"].outcomes += [errors.OutcomeUnknown("no reply"), errors.TemporaryFailure("busy")]
    alert = w.alert(node="n1")
    await w.post(alert)
    (commit,) = hold_next(w, monkeypatch)
    await commit.is_durable.wait()
    await w.engine.pause("alice")
    commit.is_known.set()
    await w.pass_time(30)
    (step,) = (await w.run()).steps
    assert [(attempt.status, attempt.error) for attempt in step.attempts] == [("unknown", "no reply")]
    assert (step.error, (await w.run()).owes_undo) == ("no reply", True)
    await w.resolve(alert)
    calls = w.actions["cap"].calls, w.actions["uncap"].calls
    assert [[call.undo_of or call.command_id for call in each] for each in calls] == [[step.attempts[0].command_id]] * 2


async def _post_behind_an_undo(w: World, alert: Alert) -> None:
    """Post an alert of a target on which the undo of an earlier run takes ten seconds."""
    first = w.alert(node="n1")
    await w.post(first)
    w.actions["uncap"].outcomes.append(timedelta(seconds=10))
    await w.resolve(first)
    await w.post(alert)


@pytest.mark.parametrize("ending", ["cancel", "resolve"])
async def test_what_ends_a_run_while_its_attempt_waits_for_another_one_keeps_it_from_acting(
    world: MakeWorld, ending: str
) -> None:
    """An undo is in flight on its target. A command that was not sent is not sent any more."""
    w = world(RETRYING)
    again = w.alert(node="n1", again="yes")
    await _post_behind_an_undo(w, again)
    waiting = (await w.runs())[-1]
    assert waiting.steps[0].status is StepStatus.RUNNING
    if ending == "cancel":
        await w.engine.order(waiting.id, OrderKind.CANCEL, "bob")
    else:
        await w.resolve(again)
    await w.pass_time(60)
    run = await w.run(waiting.id)
    assert run.status is (Status.CANCELLED if ending == "cancel" else Status.NOT_STARTED)
    assert _is_as_if_nothing_was_begun(run)
    assert w.calls() == {"cap": 1, "uncap": 1}


async def test_a_cancel_that_comes_while_the_run_is_read_for_the_last_time_keeps_it_from_acting(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alerts join, so that it is read again before it acts; each time something comes that was not read yet."""
    w = world(RETRYING)
    await _post_behind_an_undo(w, w.alert(node="n1", again="yes"))
    waiting = (await w.runs())[-1]
    touched, snapshot, touch = asyncio.Event(), Recorder.snapshot, Driver.touch
    coming = iter([w.post(w.alert(node="n1", again="twice")), w.engine.order(waiting.id, OrderKind.CANCEL, "bob")])
    under_way = []

    async def read_too_early(recorder: Recorder, run_id: str) -> RunSnapshot | None:
        read, what = await snapshot(recorder, run_id), next(coming, None) if run_id == waiting.id else None
        if what is not None:
            touched.clear()
            under_way.append(asyncio.create_task(what))
            await touched.wait()
        return read

    def tell(driver: Driver) -> None:
        touch(driver)
        touched.set()

    monkeypatch.setattr(Recorder, "snapshot", read_too_early)
    monkeypatch.setattr(Driver, "touch", tell)
    await w.post(w.alert(node="n1", again="once more"))
    await w.pass_time(60)
    await asyncio.gather(*under_way)
    assert (len(under_way), (await w.run(waiting.id)).status) == (2, Status.CANCELLED)
    assert w.calls() == {"cap": 1, "uncap": 1}


async def test_an_alert_that_joins_meanwhile_calls_nothing_off(world: MakeWorld) -> None:
    """The run would do the same again; so it makes the attempt that is on record."""
    w = world(RETRYING)
    await _post_behind_an_undo(w, w.alert(node="n1", again="yes"))
    await w.post(w.alert(node="n1", again="once more"))
    await w.pass_time(60)
    assert (await w.story((await w.runs())[-1].id)).count("step_started") == 1
    assert w.calls() == {"cap": 2, "uncap": 1}


async def test_nothing_is_begun_after_a_pause_that_comes_while_the_breaker_counts(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step touches beyond its target is put on record first, and that takes a commit."""
    w = world(ELSEWHERE, more=[Remote])
    admission, count = hold_next(w, monkeypatch, 2)
    posting = asyncio.create_task(w.post(w.alert(node="n1")))
    await admission.is_durable.wait()
    admission.is_known.set()
    await count.is_durable.wait()
    await w.engine.pause("alice")
    count.is_known.set()
    await posting
    await w.pass_time(60)
    assert w.calls() == {}
    await w.engine.resume("alice")
    await w.pass_time(0)
    assert (await w.run()).status is Status.SUCCEEDED


async def test_the_time_that_a_commit_took_is_not_taken_from_the_attempt(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store was away for longer than the attempt may take: it is made all the same, with its whole time."""
    w = world(RETRYING)
    (commit,) = hold_next(w, monkeypatch)
    posting = asyncio.create_task(w.post(w.alert(node="n1")))
    await commit.is_durable.wait()
    w.actions["cap"].outcomes.append(timedelta(seconds=15))
    await w.pass_time(60)
    commit.is_known.set()
    await posting
    began = w.clock.now()
    await w.pass_time(20)
    (call,) = w.actions["cap"].calls
    assert call.deadline >= began + timedelta(seconds=20)
    assert (await w.run()).status is Status.SUCCEEDED


async def test_a_server_that_stops_takes_back_what_it_has_not_begun(world: MakeWorld) -> None:
    """An undo is in flight on the target, and the attempt that waits for it is not one that may have been made: it does
    not act once the alert has resolved, and the undo goes on under its id."""
    w = world(RETRYING)
    first, again = w.alert(node="n1"), w.alert(node="n1", again="yes")
    await w.post(first)
    w.actions["uncap"].outcomes.append("hang")
    await w.resolve(first)
    await w.post(again)
    await w.stop_and_start(after=3600)
    ended, stopped = await w.runs()
    assert _is_as_if_nothing_was_begun(stopped)
    assert (stopped.status, stopped.decision) == (Status.NOT_STARTED, Decision.STALE)
    assert await w.story(stopped.id) == ["started", "step_started", "attempt_called_off", "closed"]
    assert not ended.owes_undo
    assert w.calls() == {"cap": 1, "uncap": 2}
    assert len({call.command_id for call in w.actions["uncap"].calls}) == 1


async def _cancelled_before_it_begins(*_: object) -> None:
    """What a driver comes to that has not had its first turn."""


async def test_a_server_that_stops_as_a_run_is_admitted_has_begun_nothing(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its driver has not come to its first turn."""
    w = world(RETRYING)

    with monkeypatch.context() as stopping:
        stopping.setattr(Workers, "_drive", _cancelled_before_it_begins)
        await w.post(w.alert(node="n1"))
        await w.engine.stop()
    assert _is_as_if_nothing_was_begun(await w.run())
    await w.restart()
    assert [call.resumed for call in w.actions["cap"].calls] == [False]


async def test_a_server_that_stops_takes_nothing_back_that_it_may_have_begun(world: MakeWorld) -> None:
    """Nor what a killed one may have begun, and it has not come to."""
    w = world(RETRYING)
    w.actions["cap"].outcomes.append("hang")
    await w.post(w.alert(node="n1"))
    await w.stop_and_start()
    assert [call.resumed for call in w.actions["cap"].calls] == [False, True]
    assert (await w.run()).status is Status.SUCCEEDED
    assert "attempt_called_off" not in await w.story()


async def test_a_store_that_is_away_holds_up_no_stop(world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it could not take back is resumed by the next server, under the same id."""
    w = world(RETRYING)
    await _post_behind_an_undo(w, w.alert(node="n1", again="yes"))

    async def away(work: object) -> None:
        raise errors.StoreUnavailable("away")

    with monkeypatch.context() as outage:
        outage.setattr(w.store, "transact", away)
        await w.engine.stop()
    assert (await w.runs())[-1].steps[0].attempts[-1].status == "running"
    await w.restart()
    await w.pass_time(60)
    assert [call.resumed for call in w.actions["cap"].calls] == [False, True]


async def test_what_goes_wrong_with_one_run_as_a_server_stops_holds_up_no_other(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world(RETRYING)
    take_back = Driver.take_back_unbegun

    async def broken_for_one(driver: Driver) -> None:
        if driver.run.target_key == "node:n1":
            raise RuntimeError("broken")
        await take_back(driver)

    with monkeypatch.context() as stopping:
        stopping.setattr(Workers, "_drive", _cancelled_before_it_begins)
        stopping.setattr(Driver, "take_back_unbegun", broken_for_one)
        await w.post(w.alert(node="n1"), w.alert(node="n2"))
        await w.engine.stop()
    broken, other = await w.runs()
    assert broken.steps[0].attempts[-1].status == "running"
    assert _is_as_if_nothing_was_begun(other)
