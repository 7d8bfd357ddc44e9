"""Approvals and waits as gates: what stands behind one happens only when it has opened."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.engine.books import CAP
from tests.unit.engine.world import World
from trainmedic_server import errors
from trainmedic_server.domain.run import Decision, OrderKind, Status

MakeWorld = Callable[..., World]

DRAIN_IF_ALLOWED = """
playbook: careful
on: {alert: Hot}
target: node
steps:
  - {id: cap, action: test.cap}
  - {id: sure, approve: "go on?"}
on_failure:
  - {id: allowed, approve: "drain it?", timeout: 1h}
  - {id: drain, action: test.other}
"""


async def failing(w: World) -> str:
    w.actions["cap"].outcomes.append(errors.PermanentFailure("no"))
    await w.post(w.alert(node="n1"))
    run = await w.run()
    assert run.status is Status.AWAITING_APPROVAL
    return run.id


async def test_an_approval_in_on_failure_is_the_one_that_is_answered(world: MakeWorld) -> None:
    """Not one of the steps that are not reached any more."""
    w = world(DRAIN_IF_ALLOWED)
    run_id = await failing(w)
    await w.engine.order(run_id, OrderKind.APPROVE, "alice")
    await w.pass_time(0)
    assert w.calls() == {"cap": 1, "other": 1}
    assert (await w.run()).status is Status.FAILED


@pytest.mark.parametrize("answer", ["reject", "silence", "resolve"])
async def test_what_stands_behind_an_approval_in_on_failure_does_not_happen_without_it(
    world: MakeWorld, answer: str
) -> None:
    """Refused, not given in time, or given up because the alert resolved."""
    w = world(DRAIN_IF_ALLOWED)
    w.actions["cap"].outcomes.append(errors.PermanentFailure("no"))
    alert = w.alert(node="n1")
    await w.post(alert)
    if answer == "reject":
        await w.engine.order((await w.run()).id, OrderKind.REJECT, "alice")
    elif answer == "resolve":
        await w.resolve(alert)
    await w.pass_time(3700)
    run = await w.run()
    assert (run.status, run.message) == (Status.FAILED, "step cap: no")
    assert run.steps[-1].status == "skipped"
    assert w.calls() == {"cap": 1}


async def test_a_failed_action_in_on_failure_does_not_keep_the_rest_from_running(world: MakeWorld) -> None:
    """The rest may be what tells a person."""
    w = world(
        """
playbook: telling
on: {alert: Hot}
target: node
steps: [{action: test.cap}]
on_failure: [{action: test.other}, {action: test.tell}]
"""
    )
    w.actions["cap"].outcomes.append(errors.PermanentFailure("no"))
    w.actions["other"].outcomes.append(errors.PermanentFailure("nor that"))
    await w.post(w.alert(node="n1"))
    run = await w.run()
    assert (run.status, run.message) == (Status.FAILED, "step step-1: no")
    assert w.calls() == {"cap": 1, "other": 1, "tell": 1}


@pytest.mark.parametrize(("wait", "ran"), [("1m", False), ("1m, on_timeout: continue", True)])
async def test_a_wait_in_on_failure_holds_what_stands_behind_it(world: MakeWorld, wait: str, ran: bool) -> None:
    """Until it resolves; a time that ran out opens it only where the playbook says so."""
    w = world(
        f"""
playbook: waiting
on: {{alert: Hot}}
target: node
steps: [{{action: test.cap}}]
on_failure: [{{wait_for: resolved, timeout: {wait}}}, {{action: test.other}}]
"""
    )
    w.actions["cap"].outcomes.append(errors.PermanentFailure("no"))
    await w.post(w.alert(node="n1"))
    await w.pass_time(61)
    assert (await w.run()).status is Status.FAILED
    assert ("other" in w.calls()) is ran


async def test_an_approval_after_a_wait_for_resolved_is_asked(world: MakeWorld) -> None:
    """The alert has resolved, as the playbook knows: that is no reason to give the question up."""
    w = world(
        """
playbook: give-back
on: {alert: Hot}
target: node
steps:
  - {id: cap, action: test.cap}
  - {id: gone, wait_for: resolved}
  - {id: ask, approve: "give it back?"}
  - {id: back, action: test.other}
"""
    )
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.resolve(alert)
    run = await w.run()
    assert run.status is Status.AWAITING_APPROVAL
    await w.engine.order(run.id, OrderKind.APPROVE, "alice")
    await w.pass_time(0)
    assert w.calls() == {"cap": 1, "other": 1}


async def test_mode_approve_does_not_answer_the_questions_of_the_playbook(world: MakeWorld) -> None:
    """Each question is answered for itself, though both are asked of the same run."""
    w = world(CAP.replace("steps:\n", "steps:\n  - {id: sure, approve: 'sure?'}\n"), mode="approve")
    await w.post(w.alert(gpu="0", node="n1"))
    run_id = (await w.run()).id
    await w.engine.order(run_id, OrderKind.APPROVE, "alice")
    await w.pass_time(0)
    assert ((await w.run()).status, w.calls()) == (Status.AWAITING_APPROVAL, {})
    await w.engine.order(run_id, OrderKind.APPROVE, "bob")
    await w.pass_time(0)
    assert w.calls() == {"cap": 1}
    record = await w.store.record(run_id)
    assert record is not None
    said = [(event.actor, event.data["step"]) for event in record.events if event.kind == "approved"]
    assert said == [("alice", "approval"), ("bob", "sure")]


@pytest.mark.parametrize(("server", "playbook"), [("approve", "observe"), ("observe", "approve")])
async def test_the_stricter_mode_counts(world: MakeWorld, server: str, playbook: str) -> None:
    """A playbook that only observes asks nobody, and neither does a server that only observes."""
    w = world(CAP + f"mode: {playbook}\n", mode=server)
    assert [run.decision for run in (await w.post(w.alert(gpu="0", node="n1"))).runs] == [Decision.OBSERVE_ONLY]
    run = await w.run()
    assert (run.status, [step.id for step in run.steps]) == (Status.OBSERVED, ["cap"])
    assert w.calls() == {}


async def test_a_run_cancelled_while_it_waits_for_its_target_leaves_the_queue(world: MakeWorld) -> None:
    """It never acts, and holds up nobody behind it."""
    first = CAP.replace("    undo: on_resolve\n", "")
    second = first.replace("playbook: cap", "playbook: second").replace("test.cap", "test.other")
    third = first.replace("playbook: cap", "playbook: third").replace("test.cap", "test.tell")
    w = world(first, second, third)
    w.actions["cap"].outcomes.append("hang")
    await w.post(w.alert(gpu="0", node="n1"))
    queued = next(run for run in await w.runs() if run.playbook == "second")
    closed = await w.engine.order(queued.id, OrderKind.CANCEL, "alice", "not tonight")
    assert (closed.status, closed.message) == (Status.CANCELLED, "cancelled by alice")
    await w.pass_time(60)
    assert w.calls() == {"cap": 1, "tell": 1}


@pytest.mark.parametrize("ending", ["failed", "cancelled", "rejected"])
async def test_a_cooldown_follows_every_run_however_it_ended(world: MakeWorld, ending: str) -> None:
    """What failed, and what a person stopped, is not begun again at once."""
    mode = "approve" if ending == "rejected" else "enforce"
    steps = CAP.replace("    undo: on_resolve\n", "  - {id: gone, wait_for: resolved}\n")
    w = world(steps + "guards: {cooldown: 10m}\n", mode=mode)
    if ending == "failed":
        w.actions["cap"].outcomes.append(errors.PermanentFailure("no"))
    await w.post(w.alert(gpu="0", node="n1"))
    if ending != "failed":
        order = OrderKind.REJECT if ending == "rejected" else OrderKind.CANCEL
        await w.engine.order((await w.run()).id, order, "alice")
        await w.pass_time(0)
    assert (await w.run()).status == ending
    await w.pass_time(599)
    assert [run.decision for run in (await w.post(w.alert(gpu="0", node="n1"))).runs] == [Decision.COOLDOWN]
    await w.pass_time(1)
    assert [run.decision for run in (await w.post(w.alert(gpu="0", node="n1"))).runs] == [Decision.STARTED]
