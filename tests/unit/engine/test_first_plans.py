"""A run's first plan is on record with its admission, where its target is free; else its driver makes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace
from pydantic import BaseModel

from tests.unit.engine.held_commits import hold_next
from tests.unit.engine.world import Scripted, World
from trainmedic_server.domain.alert import Alert, AlertStatus
from trainmedic_server.domain.run import Decision, Run, Status, StepStatus
from trainmedic_server.engine.workers import Workers
from trainmedic_server.ports.actions import Call, Inverse

MakeWorld = Callable[..., World]

CAP = """
playbook: cap
on: {alert: Hot}
target: node
guards: {cooldown: 1h}
steps:
  - {id: cap, action: test.cap, undo: on_resolve}
"""
OTHER = CAP.replace("playbook: cap", "playbook: other").replace("test.cap, undo: on_resolve", "test.other")


class Muddled(Scripted):
    name = "test.muddled"

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> Inverse | None:
        raise ZeroDivisionError


async def _admitted_and_killed(w: World, monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Post an alert, kill the server as soon as that is durable, and return what is on record then."""

    async def nothing(*_: object) -> None:
        """A server that has been killed."""

    with monkeypatch.context() as killed:
        killed.setattr(Workers, "_drive", nothing)
        await w.post(w.alert(node="n1"))
    assert w.calls() == {}
    return await w.runs()


async def _posted_in_turn(w: World, monkeypatch: pytest.MonkeyPatch, *alerts: Alert) -> None:
    """Post each alert while the commits of those before it are under way; then these end, in their order."""
    commits, posts = hold_next(w, monkeypatch, len(alerts)), []
    for commit, alert in zip(commits, alerts, strict=True):
        posts.append(asyncio.create_task(w.post(alert)))
        await commit.is_durable.wait()
    for commit, post in zip(commits, posts, strict=True):
        commit.is_known.set()
        await post


async def test_the_first_attempt_is_durable_with_the_delivery(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command is known, and so is the undo that it would owe; a server that comes later makes the same attempt."""
    w = world(CAP)
    (run,) = await _admitted_and_killed(w, monkeypatch)
    assert await w.story() == ["started", "step_started"]
    assert (run.status, run.steps[0].status, run.owes_undo) == (Status.RUNNING, StepStatus.RUNNING, True)
    await w.restart()
    assert await w.story() == ["started", "step_started", "step_resumed", "step_succeeded", "closed"]
    assert [call.command_id for call in w.actions["cap"].calls] == [run.steps[0].attempts[0].command_id]
    assert w.actions["cap"].calls[0].resumed


async def test_of_two_runs_on_a_target_one_is_planned(world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one waits for the target, and nothing of it may have been begun."""
    w = world(CAP, OTHER)
    first, second = await _admitted_and_killed(w, monkeypatch)
    assert (len(first.steps[0].attempts), len(second.steps[0].attempts)) == (1, 0)
    await w.restart()
    assert [run.status for run in await w.runs()] == [Status.SUCCEEDED] * 2
    assert w.calls() == {"cap": 1, "other": 1}


async def test_what_was_held_for_a_run_that_does_not_start_is_free_again(world: MakeWorld) -> None:
    """A guard keeps one playbook from the target, and the next one has it."""
    w = world(CAP, OTHER.replace("{cooldown: 1h}", "{}"))
    await w.post(w.alert(node="n1"))
    await w.post(w.alert(node="n1", again="yes"))
    decisions = [run.decision for run in await w.runs()]
    assert decisions == [Decision.STARTED, Decision.STARTED, Decision.COOLDOWN, Decision.STARTED]
    assert w.calls() == {"cap": 1, "other": 2}


async def test_what_resolves_in_the_same_transaction_is_not_acted_on(world: MakeWorld) -> None:
    """The run is planned by its driver, which sees that the alert has resolved."""
    w = world(CAP)
    alert = w.alert(node="n1")
    resolved = replace(alert, status=AlertStatus.RESOLVED, ends_at=w.clock.now())
    await asyncio.gather(w.post(alert), w.post(resolved))
    run = await w.run()
    assert (run.status, run.decision, w.calls()) == (Status.NOT_STARTED, Decision.STALE, {})


async def test_an_action_that_cannot_be_planned_refuses_no_delivery(world: MakeWorld) -> None:
    """The bug is that run's alone: the alerts that came with it are kept, and handled."""
    w = world(CAP, OTHER.replace("test.other", "test.muddled").replace("Hot", "Muddle"), more=[Muddled])
    admission = await w.post(w.alert("Muddle", node="n1"), w.alert(node="n2"))
    assert [run.decision for run in admission.runs] == [Decision.STARTED] * 2
    assert [run.status for run in await w.runs()] == [Status.RUNNING, Status.SUCCEEDED]
    assert w.calls() == {"cap": 1}


async def test_a_run_with_a_command_takes_two_transactions(world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """One admits it and begins its step, the other has its outcome and closes it."""
    w = world(CAP)
    await w.engine.start()
    await w.pass_time(1)  # periodic work looks first
    transact, count = w.store.transact, 0

    async def counting(work: Any) -> Any:
        nonlocal count
        count += 1
        return await transact(work)

    monkeypatch.setattr(w.store, "transact", counting)
    await w.post(w.alert(node="n1"))
    assert ((await w.run()).status, count) == (Status.SUCCEEDED, 2)


async def test_what_one_delivery_keeps_no_other_one_keeps(world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two transactions under way want the same target for the same playbook: the first starts nothing, and what it
    gives free was never the second's; so that one's run takes the target as any other."""
    w = world(CAP)
    late, fresh = w.alert(node="n1", began_ago=100_000.0), w.alert(node="n1", again="yes")
    await _posted_in_turn(w, monkeypatch, late, fresh)
    assert [(run.decision, run.status) for run in await w.runs()] == [
        (Decision.STALE, Status.NOT_STARTED),
        (Decision.STARTED, Status.SUCCEEDED),
    ]
    assert w.calls() == {"cap": 1}


@pytest.mark.parametrize("together", [True, False])
async def test_what_comes_later_does_not_overtake_what_waits(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    """A GPU is worked on, an alert wants its whole node, and then one another GPU, which is free: the node comes
    before it, whether they came in one transaction or while the first was under way."""
    w = world(CAP.replace("target: node", "target: gpu"), OTHER.replace("Hot", "Broken"))
    w.actions["cap"].outcomes.append(timedelta(seconds=30))
    await w.post(w.alert(node="n1", gpu="GPU-a"))
    order: list[str] = []
    monkeypatch.setattr(w.actions["cap"], "perform", lambda call: _noted(order, call))
    monkeypatch.setattr(w.actions["other"], "perform", lambda call: _noted(order, call))

    node, gpu = w.alert("Broken", node="n1"), w.alert(node="n1", gpu="GPU-b")
    if together:
        await w.post(node, gpu)
    else:
        await _posted_in_turn(w, monkeypatch, node, gpu)
    await w.pass_time(60)
    assert order == ["node:n1", "gpu:n1/GPU-b"]


async def _noted(order: list[str], call: Call) -> Mapping[str, Any]:
    order.append(call.target.key)
    return {"done": True}
