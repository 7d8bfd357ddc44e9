"""The two switches: while paused nothing harmful is begun, once the breaker is open no run begins to act."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.unit.engine.books import CAP
from tests.unit.engine.test_runs import RETRYING
from tests.unit.engine.world import World
from trainmedic_server import errors
from trainmedic_server.domain.run import Decision, OrderKind, Status, StepStatus, UndoStatus

MakeWorld = Callable[..., World]

CAP_THEN_ACT = """
playbook: cap-then-act
on: {alert: Hot}
target: node
steps:
  - {id: cap, action: test.cap, undo: on_resolve}
  - {id: look, action: test.look}
  - {id: act, action: test.other}
"""


async def test_an_undo_of_a_run_that_pause_holds_back_is_not_held_back(world: MakeWorld) -> None:
    """It is due though the run is still open; the run goes on when somebody resumes it."""
    w = world(CAP_THEN_ACT.replace("  - {id: act", "  - {wait_for: resolved}\n  - {id: act"))
    w.actions["look"].outcomes.append(timedelta(seconds=10))
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.engine.pause("alice")
    await w.pass_time(20)
    await w.resolve(alert)
    assert (await w.run()).waiting_on == "resume"
    assert w.calls() == {"cap": 1, "look": 1, "uncap": 1}
    await w.engine.resume("alice")
    await w.pass_time(0)
    assert (await w.run()).status is Status.SUCCEEDED
    assert w.calls() == {"cap": 1, "look": 1, "uncap": 1, "other": 1}
    assert (await w.story()).count("waiting_for_resume") == 1


async def test_an_undo_on_failure_is_not_held_back_by_a_paused_on_failure_step(world: MakeWorld) -> None:
    """The run has failed, though it is not closed before what follows a failure could be done."""
    w = world(CAP_THEN_ACT.replace("on_resolve", "on_failure") + "on_failure: [{action: test.other}]\n")
    w.actions["look"].outcomes += [timedelta(seconds=10)]
    await w.post(w.alert(node="n1"))
    await w.engine.pause("alice")
    w.actions["look"].outcomes.clear()
    await w.pass_time(20)
    assert w.calls() == {"cap": 1, "look": 1}
    await w.engine.resume("alice")
    await w.pass_time(0)
    assert w.calls() == {"cap": 1, "look": 1, "other": 1}

    failing = w.alert(node="n2")
    w.actions["look"].outcomes += [errors.PermanentFailure("blind")]
    w.actions["cap"].outcomes.append(timedelta(seconds=5))
    await w.post(failing)
    await w.engine.pause("alice")
    await w.pass_time(10)
    assert (await w.runs())[-1].waiting_on == "resume"
    assert w.calls()["uncap"] == 1


async def test_an_undo_that_fails_while_the_run_is_held_is_tried_again(world: MakeWorld) -> None:
    """It is as much a duty as after the close."""
    w = world(CAP_THEN_ACT)
    w.actions["look"].outcomes.append(timedelta(seconds=10))
    w.actions["uncap"].outcomes += [errors.TemporaryFailure("away")] * 2
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.engine.pause("alice")
    await w.pass_time(20)
    await w.resolve(alert)
    await w.pass_time(60)
    assert w.calls()["uncap"] == 3
    assert (await w.run()).steps[0].undo.status is UndoStatus.DONE  # type: ignore[union-attr]


@pytest.mark.parametrize("ending", ["cancel", "resolve", "undo"])
async def test_an_attempt_in_flight_that_pause_holds_back_holds_nothing_back_itself(
    world: MakeWorld, ending: str
) -> None:
    """After a restart under pause it is not asked about again, for that would act; nobody has to wait for it."""
    w = world(RETRYING)
    w.actions["cap"].outcomes.append("hang")
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.engine.pause("alice")
    await w.restart(after=1)
    run = await w.run()
    assert (run.status, run.waiting_on) == (Status.WAITING, "resume")
    if ending == "resolve":
        await w.resolve(alert)
    else:
        await w.engine.order(run.id, OrderKind(ending), "bob")
        await w.pass_time(0)
    run = await w.run()
    assert run.steps[0].status is StepStatus.UNKNOWN
    assert not run.is_open
    assert w.calls() == ({"cap": 1} if ending == "cancel" else {"cap": 1, "uncap": 1})
    await w.resolve(alert)
    assert w.calls() == {"cap": 1, "uncap": 1}
    assert w.actions["uncap"].calls[0].undo_of == w.actions["cap"].calls[0].command_id


async def test_an_attempt_in_flight_is_not_asked_about_after_a_very_long_pause(world: MakeWorld) -> None:
    """The world that it was meant for has changed; it may have been applied, so its undo stays owed."""
    w = world(RETRYING)
    await w.engine.start()
    w.actions["cap"].outcomes.append("hang")
    await w.post(w.alert(node="n1"))
    await w.engine.pause("alice")
    await w.restart(after=1)
    await w.pass_time(3600)
    await w.engine.resume("alice")
    await w.pass_time(1)
    run = await w.run()
    assert (run.status, run.steps[0].status, run.owes_undo) == (Status.FAILED, StepStatus.UNKNOWN, True)
    assert w.calls() == {"cap": 1}


async def test_an_attempt_that_waits_for_an_undo_is_not_made_once_the_server_is_paused(world: MakeWorld) -> None:
    """Its intent was on record before the pause, the act would come after."""
    w = world(RETRYING)
    first = w.alert(node="n1")
    await w.post(first)
    w.actions["uncap"].outcomes.append(timedelta(seconds=10))
    await w.resolve(first)
    await w.pass_time(1)
    await w.post(w.alert(node="n1"))
    await w.engine.pause("alice")
    await w.pass_time(60)
    assert w.calls() == {"cap": 1, "uncap": 1}
    assert (await w.runs())[-1].waiting_on == "resume"
    await w.engine.resume("alice")
    await w.pass_time(0)
    assert w.calls() == {"cap": 2, "uncap": 1}


async def test_a_retry_waits_for_the_end_of_a_pause(world: MakeWorld) -> None:
    """And keeps its count."""
    w = world(RETRYING)
    w.actions["cap"].outcomes += [errors.TemporaryFailure("busy")]
    await w.post(w.alert(node="n1"))
    await w.engine.pause("alice")
    await w.pass_time(60)
    assert w.calls() == {"cap": 1}
    await w.engine.resume("alice")
    await w.pass_time(0)
    assert [attempt.number for attempt in (await w.run()).steps[0].attempts] == [1, 2]


async def test_an_approval_given_while_paused_acts_after_the_pause_only(world: MakeWorld) -> None:
    """Approve says that it may, pause that nothing may now."""
    w = world(CAP, mode="approve")
    await w.post(w.alert(gpu="0", node="n1"))
    await w.engine.pause("alice")
    await w.engine.order((await w.run()).id, OrderKind.APPROVE, "bob")
    await w.pass_time(60)
    assert w.calls() == {}
    await w.engine.resume("alice")
    await w.pass_time(0)
    assert w.calls() == {"cap": 1}


async def test_a_run_that_waits_for_its_target_is_called_off_when_the_breaker_opens(world: MakeWorld) -> None:
    """At once, also if somebody closes the breaker before the target is free; undo goes on."""
    other = CAP.replace("playbook: cap", "playbook: other").replace("test.cap", "test.other")
    w = world(CAP, other.replace("    undo: on_resolve\n", ""), breaker_min_nodes=1, breaker_share=0.5)
    w.actions["cap"].outcomes.append(timedelta(seconds=25))
    first = w.alert(gpu="0", node="n1")
    await w.post(first)
    assert (await w.runs())[-1].waiting_on == "target"
    await w.post(w.alert(gpu="0", node="n2"))
    assert w.engine.controls.breaker_open
    queued = (await w.runs())[1]
    assert (queued.status, queued.decision) == (Status.NOT_STARTED, Decision.BREAKER_OPEN)
    await w.engine.close_breaker("alice")
    await w.pass_time(60)
    await w.resolve(first)
    assert w.calls() == {"cap": 1, "uncap": 1}


async def test_a_run_that_has_waited_does_not_begin_to_act_once_the_breaker_is_open(world: MakeWorld) -> None:
    """Neither after a wait nor after an approval; one that has acted goes on, its node is counted."""
    waiting = """
playbook: waiting
on: {alert: Slow}
target: node
steps:
  - {id: gone, wait_for: resolved, timeout: 1m, on_timeout: continue}
  - {id: act, action: test.other}
"""
    acting = (
        waiting.replace("waiting", "acting").replace("Slow", "Hot").replace("steps:", "steps:\n  - action: test.cap")
    )
    w = world(waiting, acting, breaker_min_nodes=2, breaker_share=0.5)
    await w.post(w.alert("Slow", node="n1"))
    await w.post(w.alert("Hot", node="n2"))
    await w.post(w.alert("Hot", node="n3"))
    assert w.engine.controls.breaker_open
    await w.pass_time(61)
    waited, acted, refused = await w.runs()
    assert (waited.status, waited.decision) == (Status.NOT_STARTED, Decision.BREAKER_OPEN)
    assert acted.status is Status.SUCCEEDED
    assert refused.decision is Decision.BREAKER_OPEN
    assert w.calls() == {"cap": 1, "other": 1}


async def test_what_the_breaker_called_off_starts_anew_when_its_alert_is_reported_again(world: MakeWorld) -> None:
    """It is not replayed when the breaker closes; Alertmanager says what is still wrong."""
    w = world(CAP, mode="approve", breaker_min_nodes=1, breaker_share=0.5)
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    await w.post(w.alert(gpu="0", node="n2"))
    run = (await w.runs())[0]
    await w.engine.order(run.id, OrderKind.APPROVE, "bob")
    await w.pass_time(0)
    assert (await w.run(run.id)).decision is Decision.BREAKER_OPEN
    assert w.calls() == {}
    await w.engine.close_breaker("alice")
    await w.pass_time(5)
    assert len(await w.runs()) == 2
    assert [run.decision for run in (await w.post(alert)).runs] == [Decision.STARTED]


async def test_a_delivery_and_a_pause_at_the_same_moment_agree(world: MakeWorld) -> None:
    """Whoever is first, nothing harmful is begun after pause has returned."""
    w = world(CAP)
    _, (controls, _) = await asyncio.gather(w.post(w.alert(gpu="0", node="n1")), w.engine.pause("alice"))
    begun = w.calls()
    assert controls.paused
    await w.pass_time(60)
    assert w.calls() == begun
