"""After a kill at any moment: open runs go on, waits keep their deadlines, undo duties are carried out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from msgspec.structs import replace

from tests.unit.engine.books import CAP, catalog_of
from tests.unit.engine.test_runs import RETRYING, TWO_STAGES
from tests.unit.engine.world import Source, World
from trainmedic_server import errors
from trainmedic_server.domain.run import Decision, OrderKind, Status, StepStatus
from trainmedic_server.ports.playbooks import CompiledPlaybook
from trainmedic_server.ports.store import Transaction

MakeWorld = Callable[..., World]


async def test_an_attempt_in_flight_is_resumed_by_its_command_id(world: MakeWorld) -> None:
    """Never silently done twice: the receiver sees the same command again."""
    w = world(RETRYING)
    w.actions["cap"].outcomes.append("hang")
    await w.post(w.alert(node="n1"))
    await w.restart(after=3)
    first, second = w.actions["cap"].calls
    assert first.command_id == second.command_id
    assert (first.resumed, second.resumed) == (False, True)
    assert second.deadline == first.deadline
    assert (await w.run()).status is Status.SUCCEEDED
    assert "step_resumed" in await w.story()


async def test_an_attempt_whose_time_ran_out_meanwhile_is_given_new_time(world: MakeWorld) -> None:
    """The receiver's memory tells whether it was applied; a command past its end could not ask."""
    w = world(RETRYING)
    w.actions["cap"].outcomes.append("hang")
    await w.post(w.alert(node="n1"))
    await w.restart(after=100)
    first, second = w.actions["cap"].calls
    assert second.command_id == first.command_id
    assert second.deadline > w.clock.now()


async def test_a_wait_keeps_its_deadline_over_a_restart(world: MakeWorld) -> None:
    """Five minutes from the step's start, not from the restart."""
    w = world(TWO_STAGES)
    await w.post(w.alert(node="n1"))
    await w.pass_time(200)
    await w.restart(after=50)
    await w.pass_time(49)
    assert w.calls() == {"cap": 1}
    await w.pass_time(2)
    assert w.calls() == {"cap": 2}


async def test_a_retry_keeps_its_time_over_a_restart(world: MakeWorld) -> None:
    """The backoff goes on where it stood."""
    w = world(RETRYING)
    w.actions["cap"].outcomes.append(errors.TemporaryFailure("busy"))
    await w.post(w.alert(node="n1"))
    await w.restart()
    await w.pass_time(1)
    assert w.calls() == {"cap": 1}
    await w.pass_time(2)
    assert w.calls() == {"cap": 2}


async def test_an_undo_owed_from_before_is_carried_out_when_the_alert_resolves(world: MakeWorld) -> None:
    """And one whose alert resolved before the restart at once."""
    w = world(CAP)
    alert, other = w.alert(gpu="0", node="n1"), w.alert(gpu="1", node="n1")
    await w.post(alert, other)
    w.actions["uncap"].outcomes.append("hang")
    await w.resolve(other)
    await w.restart(after=5)
    assert w.calls() == {"cap": 2, "uncap": 2}
    assert len({call.command_id for call in w.actions["uncap"].calls}) == 1
    await w.resolve(alert)
    assert w.calls() == {"cap": 2, "uncap": 3}
    assert not any(run.owes_undo for run in await w.runs())


async def test_undo_after_a_restart_is_not_held_back_by_pause(world: MakeWorld) -> None:
    """Nor is the pause forgotten."""
    w = world(CAP)
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    await w.engine.pause("alice")
    await w.restart()
    assert w.engine.controls.paused
    await w.resolve(alert)
    assert w.calls() == {"cap": 1, "uncap": 1}


async def test_an_approval_outlives_a_restart(world: MakeWorld) -> None:
    """The question is still asked, and the answer still counts."""
    w = world(CAP, mode="approve")
    await w.post(w.alert(gpu="0", node="n1"))
    await w.pass_time(1800)
    await w.restart(mode="approve")
    run = await w.run()
    assert run.status is Status.AWAITING_APPROVAL
    await w.engine.order(run.id, OrderKind.APPROVE, "alice")
    await w.pass_time(0)
    assert w.calls() == {"cap": 1}


async def test_after_a_long_downtime_an_open_run_is_stale_and_still_owes_its_undo(world: MakeWorld) -> None:
    """Nothing stale is acted on; what was taken is given back."""
    w = world(TWO_STAGES)
    await w.engine.start()
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.restart(after=3600)
    run = await w.run()
    assert (run.status, run.decision) == (Status.CANCELLED, Decision.STALE)
    await w.pass_time(600)
    assert w.calls() == {"cap": 1}
    await w.resolve(alert)
    assert w.calls() == {"cap": 1, "uncap": 1}


async def test_a_run_goes_on_with_the_playbook_that_it_started_with(world: MakeWorld) -> None:
    """Also when the file has changed since, and after a restart."""
    w = world(TWO_STAGES)
    await w.post(w.alert(node="n1"))
    w.catalog = catalog_of([TWO_STAGES.replace("amount: 60", "amount: 10")], w.actions)
    await w.restart()
    await w.pass_time(301)
    assert [call.params.model_dump()["amount"] for call in w.actions["cap"].calls] == [80, 60]


async def test_targets_are_held_again_after_a_restart(world: MakeWorld) -> None:
    """Who had begun comes first; who waited waits on."""
    second = (
        CAP.replace("playbook: cap", "playbook: later")
        .replace("test.cap", "test.other")
        .replace("    undo: on_resolve\n", "")
    )
    w = world(CAP, second)
    w.actions["cap"].outcomes += [timedelta(seconds=60), timedelta(seconds=20)]
    await w.post(w.alert(gpu="0", node="n1"))
    await w.restart(after=1)
    assert w.calls() == {"cap": 2}
    await w.pass_time(25)
    assert w.calls() == {"cap": 2, "other": 1}


async def test_a_begun_run_waits_for_a_busy_target_at_rest(world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first wait exceeded the maximum age, which no longer ends it: only the lock is awaited."""
    patient = CAP.replace("playbook: cap", "playbook: patient").replace("steps:\n", "steps:\n  - wait: 30m\n")
    busy = CAP.replace("playbook: cap", "playbook: busy").replace("test.cap", "test.other").replace("Hot", "Busy")
    w = world(patient, busy.replace("    undo: on_resolve\n", "    timeout: 2h\n"))
    w.actions["other"].outcomes += [timedelta(hours=1)] * 2
    await w.post(w.alert(gpu="0", node="n1"))
    await w.pass_time(1500)
    await w.post(w.alert("Busy", gpu="0", node="n1"))
    await w.pass_time(600)
    await w.restart(after=1)
    slept: list[datetime] = []
    sleep_until = w.clock.sleep_until

    async def counted(when: datetime) -> None:
        slept.append(when)
        await sleep_until(when)

    monkeypatch.setattr(w.clock, "sleep_until", counted)
    for _ in range(200):
        await asyncio.sleep(0)
    assert slept == []
    await w.pass_time(3700)
    assert w.calls() == {"other": 2, "cap": 1}


async def test_a_run_that_never_began_is_stale_if_its_alert_resolved_meanwhile(world: MakeWorld) -> None:
    """Killed between the admission and the first act, and resolved before the restart."""
    w = world(
        CAP,
        CAP.replace("playbook: cap", "playbook: later")
        .replace("test.cap", "test.other")
        .replace("    undo: on_resolve\n", ""),
    )
    w.actions["cap"].outcomes.append(timedelta(seconds=600))
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    await w.engine.stop()

    def end(tx: Transaction) -> None:
        record = tx.alerts([alert.identity])[alert.identity]
        tx.save_alerts([replace(record, resolved_at=w.clock.now(), resolved_because="alertmanager")])

    await w.store.transact(end)
    await w.restart(after=1)
    never = next(run for run in await w.runs() if run.playbook == "later")
    assert (never.status, never.decision) == (Status.NOT_STARTED, Decision.STALE)
    assert "other" not in w.calls()


async def test_an_alert_that_nobody_speaks_of_any_more_counts_as_resolved(world: MakeWorld) -> None:
    """A resolved that never comes does not hold an undo for ever; the reason is on record."""
    w = world(CAP)
    await w.engine.start()
    await w.post(w.alert(gpu="0", node="n1"))
    await w.pass_time(12 * 3600 - 120)
    assert w.calls() == {"cap": 1}
    await w.pass_time(300)
    assert w.calls() == {"cap": 1, "uncap": 1}
    record = await w.store.record((await w.run()).id)
    assert record is not None
    assert [event.data["because"] for event in record.events if event.kind == "alert_resolved"] == ["assumed"]


async def test_an_alertmanager_that_can_be_asked_is_asked(world: MakeWorld) -> None:
    """Minutes, not hours, after the last word of it; and what still fires stays firing."""
    source = Source()
    w = world(CAP, source=source)
    await w.engine.start()
    ended, firing = w.alert(gpu="0", node="n1"), w.alert(gpu="1", node="n1")
    source.firing.add(firing.identity)
    await w.post(ended, firing)
    await w.pass_time(600)
    assert w.calls() == {"cap": 2, "uncap": 1}
    runs = {run.target.gpu: run for run in await w.runs() if run.target}
    assert runs["1"].owes_undo
    assert runs["0"].steps[0].status is StepStatus.SUCCEEDED


async def test_an_undo_is_carried_out_though_its_playbook_cannot_be_used_any_more(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new release refuses the old text: an open run fails and says so, and what was taken is given back."""

    def refuse(text: str, source: str) -> CompiledPlaybook:
        raise errors.PlaybookError(f"{source}: no action of that name")

    w = world(TWO_STAGES.replace("Hot", "Hotter"), CAP)
    closed, going = w.alert(gpu="0", node="n1"), w.alert(name="Hotter", node="n2")
    await w.post(closed, going)
    w.catalog = catalog_of([], w.actions)
    monkeypatch.setattr(w.catalog, "compile", refuse)
    await w.restart()
    was_closed, was_open = await w.runs()
    assert (was_closed.status, was_open.status) == (Status.SUCCEEDED, Status.FAILED)
    assert "no action of that name" in was_open.message
    assert was_closed.owes_undo
    assert was_open.owes_undo
    await w.resolve(closed)
    await w.resolve(going)
    assert w.calls() == {"cap": 2, "uncap": 2}
    assert not any(run.owes_undo for run in await w.runs())
