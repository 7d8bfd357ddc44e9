"""A clock that is set while the server runs or is down: nothing is forgotten for it, and no undo waits for it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.unit.engine.world import World
from trainmedic.wire.ids import first_id
from trainmedic_server import errors
from trainmedic_server.adapters.sql_store.history_cursor import microseconds_of
from trainmedic_server.domain.pause import PauseOrder, Scope
from trainmedic_server.domain.run import Decision, Status, StepStatus, UndoStatus

pytestmark = pytest.mark.usefixtures("usual_heartbeat")

MakeWorld = Callable[..., World]

DAY = timedelta(days=1)
HOUR = timedelta(hours=1)

CAP = """
playbook: cap
on: {alert: Hot}
target: node
steps:
  - {id: cap, action: test.cap, undo: on_resolve}
"""
WAITING = """
playbook: waiting
on: {alert: Hot}
target: node
steps:
  - {id: gone, wait_for: resolved, timeout: 10m, on_timeout: continue}
  - {id: act, action: test.other}
"""


async def started(world: MakeWorld, *playbooks: str, **settings: Any) -> World:
    """A server with its heartbeat, which has run for a minute."""
    w = world(*playbooks, **settings)
    await w.engine.start()
    await w.pass_time(60)
    return w


async def set_clock(w: World, by: timedelta, *, while_down: bool) -> None:
    """Set the clock, forward or back, while the server runs or between its end and its next start."""
    w.clock.set_back(-by)
    if while_down:
        await w.restart()
    await w.pass_time(30)


async def test_ids_are_of_the_time_that_the_clock_shows(world: MakeWorld) -> None:
    """Also after it was set back: the history finds what touched a node by the time in the ids of runs."""
    w = await started(world, CAP)
    await w.post(w.alert(node="n1"))
    await set_clock(w, -30 * DAY, while_down=False)
    await w.post(w.alert(node="n2"))
    runs = await w.runs()
    assert len(runs) == 2
    for run in runs:
        assert run.id >= first_id(microseconds_of(run.created_at) // 1000)
        assert run.id < first_id(microseconds_of(run.created_at + HOUR) // 1000)


@pytest.mark.parametrize("while_down", [False, True])
async def test_a_clock_that_is_set_forward_lets_nothing_be_forgotten(world: MakeWorld, while_down: bool) -> None:
    """History is kept for ninety days in which a server was at work, so is the identity of alerts."""
    w = await started(world, CAP, max_age=200 * DAY)
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.resolve(alert)
    began = (await w.run()).created_at
    await set_clock(w, 100 * DAY, while_down=while_down)
    assert w.engine.ago(90 * DAY) < began
    assert await w.store.prune(w.engine.ago(90 * DAY)) == 0
    assert [run.decision for run in (await w.post(alert)).runs] == [Decision.DUPLICATE]
    await w.restart(after=5)
    assert w.engine.ago(90 * DAY) < began


async def test_what_is_kept_for_a_while_goes_when_that_has_passed_in_truth(world: MakeWorld) -> None:
    """Counted while a server is at work: neither a step forward nor a week in which none was up is part of it."""
    w = await started(world, CAP)
    began = w.clock.now()
    await w.pass_time(HOUR.total_seconds())
    await set_clock(w, 100 * DAY, while_down=False)
    await w.restart(after=7 * DAY.total_seconds())
    await w.pass_time(HOUR.total_seconds())
    assert w.engine.ago(2 * HOUR) < began + timedelta(minutes=1)
    assert w.engine.ago(1.9 * HOUR) > began
    await w.pass_time(HOUR.total_seconds())
    assert w.engine.ago(HOUR) == w.clock.now() - HOUR


@pytest.mark.parametrize("while_down", [False, True])
async def test_an_alert_is_not_taken_for_silent_because_the_clock_was_set(world: MakeWorld, while_down: bool) -> None:
    """It counts as resolved once nothing was heard of it for twelve hours in which a server listened; not earlier."""
    w = await started(world, CAP)
    await w.post(w.alert(node="n1"))
    await set_clock(w, 100 * DAY, while_down=while_down)
    await w.pass_time(11 * HOUR.total_seconds())
    assert w.calls() == {"cap": 1}
    await w.pass_time(HOUR.total_seconds() + 120)
    assert w.calls() == {"cap": 1, "uncap": 1}


@pytest.mark.parametrize("while_down", [False, True])
async def test_an_alert_from_the_future_is_silent_in_time_too(world: MakeWorld, while_down: bool) -> None:
    """It was heard of while the clock was ahead by a hundred days; its undo does not wait for so long."""
    w = await started(world, CAP)
    await w.post(w.alert(node="n1"))
    await set_clock(w, -100 * DAY, while_down=while_down)
    await w.pass_time(12.5 * HOUR.total_seconds())
    assert w.calls() == {"cap": 1, "uncap": 1}


async def test_guards_count_over_a_clock_that_is_set_forward(world: MakeWorld) -> None:
    """What ran five minutes ago ran five minutes ago."""
    guarded = CAP.replace("steps:", "guards: {max_runs: {count: 2, per: 1h}, cooldown: 30m}\nsteps:")
    w = await started(world, guarded, breaker_min_nodes=2, breaker_share=0.1)
    first = w.alert(node="n1")
    await w.post(first)
    await w.resolve(first)
    await set_clock(w, 2 * HOUR, while_down=False)
    assert [run.decision for run in (await w.post(w.alert(node="n1", again="yes"))).runs] == [Decision.COOLDOWN]
    assert [run.decision for run in (await w.post(w.alert(node="n2"))).runs] == [Decision.STARTED]
    assert [run.decision for run in (await w.post(w.alert(node="n3"))).runs] == [Decision.RATE_LIMITED]
    await w.pass_time(3600)
    assert [run.decision for run in (await w.post(w.alert(node="n1", later="yes"))).runs] == [Decision.STARTED]


async def test_the_breaker_counts_over_a_clock_that_is_set_forward(world: MakeWorld) -> None:
    """Three nodes in two minutes are three nodes in two minutes."""
    w = await started(world, CAP, breaker_min_nodes=2, breaker_share=0.1)
    for number in range(3):
        await w.post(w.alert(node=f"n{number}"))
        await set_clock(w, HOUR, while_down=False)
    assert w.engine.controls.breaker_open


@pytest.mark.parametrize("while_down", [False, True])
async def test_an_owed_undo_is_tried_on_when_the_clock_is_set_back(world: MakeWorld, while_down: bool) -> None:
    """Not later than it would have been."""
    w = await started(world, CAP)
    uncap = w.actions["uncap"]
    uncap.outcomes.extend([errors.TemporaryFailure("the agent is away")] * 4)
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.resolve(alert)
    await w.pass_time(7)
    await set_clock(w, -2 * HOUR, while_down=while_down)
    await w.pass_time(300)
    assert (await w.run()).steps[0].undo.status is UndoStatus.DONE  # type: ignore[union-attr]


@pytest.mark.parametrize("while_down", [False, True])
async def test_a_retry_is_made_when_the_clock_is_set_back(world: MakeWorld, while_down: bool) -> None:
    """Within the longest wait that its step has."""
    retried = CAP.replace("undo: on_resolve", "retry: {attempts: 3, delay: 20s, max_delay: 1m}")
    w = await started(world, retried)
    w.actions["cap"].outcomes.append(errors.TemporaryFailure("not now"))
    await w.post(w.alert(node="n1"))
    await set_clock(w, -2 * HOUR, while_down=while_down)
    await w.pass_time(60)
    assert (await w.run()).status is Status.SUCCEEDED


@pytest.mark.parametrize("while_down", [False, True])
async def test_a_wait_ends_in_time_when_the_clock_is_set_back(world: MakeWorld, while_down: bool) -> None:
    """It begins anew at the worst."""
    w = await started(world, WAITING)
    await w.post(w.alert(node="n1"))
    await w.pass_time(300)
    await set_clock(w, -2 * HOUR, while_down=while_down)
    await w.pass_time(601)
    assert w.calls() == {"other": 1}


async def test_a_wait_ends_no_earlier_when_the_clock_is_set_forward(world: MakeWorld) -> None:
    """What comes after a wait may be harsher; it is not due because of a clock."""
    w = await started(world, WAITING)
    await w.post(w.alert(node="n1"))
    await set_clock(w, 2 * HOUR, while_down=False)
    assert w.calls() == {}
    assert (await w.run()).steps[0].status is StepStatus.WAITING
    await w.pass_time(500)
    assert w.calls() == {}
    await w.pass_time(100)
    assert w.calls() == {"other": 1}


async def test_an_attempt_of_an_undo_that_a_kill_interrupted_has_its_time_and_no_more(world: MakeWorld) -> None:
    """Its deadline, two hours ahead by the clock that was set back, is not waited for."""
    w = await started(world, CAP)
    w.actions["uncap"].outcomes.extend(["hang", "hang"])
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.resolve(alert)
    await set_clock(w, -2 * HOUR, while_down=True)
    await w.pass_time(60)
    assert (await w.run()).steps[0].undo.status is UndoStatus.DONE  # type: ignore[union-attr]


async def test_steps_of_the_clock_are_on_record(world: MakeWorld) -> None:
    """A clock behind the last heartbeat is told in the history, and counted."""
    w = await started(world, CAP)
    await set_clock(w, -2 * HOUR, while_down=True)
    [step] = [event for event in await w.store.events_after(0, 1000) if event.kind == "clock_stepped"]
    assert step.data["kind"] == "believed"
    assert step.data["seconds"] == pytest.approx(-7200, abs=60)
    assert w.metrics.clock_steps.labels("believed")._value.get() == 1


@pytest.mark.parametrize("while_down", [False, True])
async def test_a_pause_holds_when_the_clock_is_set_back_to_before_it(world: MakeWorld, while_down: bool) -> None:
    """Nobody has resumed it; and of windows that come again those between stay open."""
    w = await started(world, CAP)
    await w.engine.pause("ann")
    windows = PauseOrder(Scope(playbook="other"), length=HOUR, every=DAY)
    await w.engine.pause("ann", windows)
    await set_clock(w, -2 * HOUR, while_down=while_down)
    assert w.engine.controls.paused
    await w.post(w.alert(gpu="0", node="n1"))
    assert ((await w.run()).decision, w.calls()) == (Decision.PAUSED, {})
    await w.engine.resume("ann", pause_id=w.engine.controls.pauses[0].id)
    await w.pass_time(4 * 3600)
    assert not any(pause.is_in_force(w.clock.now()) for pause in w.engine.controls.pauses)


ASKING = """
playbook: asking
on: {alert: Hot}
target: node
steps:
  - {id: sure, approve: {message: "go on?", remind: 10m}, timeout: 1h, on_timeout: approve}
  - {id: act, action: test.other}
"""


async def test_a_question_that_is_reminded_of_ends_although_the_clock_was_set_forward(world: MakeWorld) -> None:
    """What the clock was set forward by is no part of its time, and is left out of it once."""
    w = await started(world, ASKING, max_age=9 * DAY)
    await w.post(w.alert(node="n1"))
    await set_clock(w, DAY, while_down=False)
    await w.pass_time(3600 - 120)
    assert w.calls() == {}
    await w.pass_time(180)
    assert ((await w.run()).status, w.calls()) == (Status.SUCCEEDED, {"other": 1})


async def test_silence_while_no_server_was_up_is_no_consent(world: MakeWorld) -> None:
    """Nobody could have refused."""
    w = await started(world, ASKING, max_age=9 * DAY)
    await w.post(w.alert(node="n1"))
    await w.restart(after=2 * 3600)
    await w.pass_time(3600 - 60)
    assert w.calls() == {}
    await w.pass_time(120)
    assert w.calls() == {"other": 1}
