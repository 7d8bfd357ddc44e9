"""The breaker counts machines: every node that a run touches, through a job too, and before it touches any."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel
from structlog.testing import capture_logs

from tests.unit.engine.test_placed import Gather, Somewhere, Spread
from tests.unit.engine.world import Amount, Scripted, World
from trainmedic_core.target import Target
from trainmedic_server.domain.run import Decision, OrderKind, Run, Status, StepStatus, UndoStatus
from trainmedic_server.ports.actions import Call

MakeWorld = Callable[..., World]

CLUSTER = [f"n{number}" for number in range(50)]
LIMITS = {"breaker_share": 0.3, "breaker_min_nodes": 2}

SPREAD = """
playbook: spread
on: {alert: Slow}
target: job
steps:
  - {id: all, action: test.spread, undo: on_resolve, retry: {attempts: 3, delay: 1s}}
"""


class OnJobs(Spread):
    """Works on the nodes of a job: job 0 has the first ten of the cluster, job 1 the next ten, and so on."""

    async def locate(self, call: Call) -> BaseModel:
        params = call.params
        assert isinstance(params, Somewhere)
        assert call.target.job is not None
        first = 10 * int(call.target.job)
        return params.model_copy(update={"nodes": CLUSTER[first : first + 10]}) if params.nodes is None else params


class Elsewhere(Amount):
    on: tuple[str, ...] = ()


class Remote(Scripted):
    """An action of another package, which says itself what it touches."""

    name = "test.remote"
    Params = Elsewhere

    @classmethod
    def touches(cls, params: BaseModel, target: Target) -> Collection[str]:
        assert isinstance(params, Elsewhere)
        if params.amount < 0:
            raise LookupError("a bug")
        return params.on


async def made(world: MakeWorld, *playbooks: str, **settings: Any) -> World:
    """A server that knows fifty nodes and opens its breaker beyond fifteen."""
    w = world(*playbooks, more=[OnJobs, Gather, Remote], **{**LIMITS, **settings})
    await w.store.transact(lambda tx: tx.remember_nodes(CLUSTER, w.clock.now()))
    return w


def nodes_capped(w: World) -> set[str]:
    calls = w.actions["spread"].calls
    return {target.node or "" for call in calls for target in OnJobs.places(call.params)}


def ended(runs: Collection[Run]) -> list[tuple[str, str]]:
    return [(str(run.status), str(run.decision)) for run in runs]


async def test_runs_on_jobs_are_stopped_before_they_touch_too_many_nodes(world: MakeWorld) -> None:
    """Five jobs on all nodes: the first has a fifth of them, and with the second it would be two fifths."""
    w = await made(world, SPREAD)
    alerts = [w.alert("Slow", job_name=str(job)) for job in range(5)]
    await w.post(*alerts)
    await w.pass_time(60)
    first, *others = await w.runs()
    assert nodes_capped(w) == set(CLUSTER[:10])
    assert (first.status, first.touched) == (Status.SUCCEEDED, tuple(sorted(CLUSTER[:10])))
    assert ended(others) == [("not_started", "breaker_open")] * 4
    assert all(run.acted_at is None and run.touched == () for run in others)
    assert [run.steps[0].undo.status for run in others if run.steps[0].undo] == [UndoStatus.DROPPED] * 4
    assert w.engine.controls.breaker_reason is not None
    assert w.engine.controls.breaker_reason.startswith("10 of 50 known nodes were acted on within 10m; with 10 more")
    assert w.metrics.decisions.labels("spread", "breaker_open")._value.get() == 4
    [opened] = [event for event in await w.store.events_after(0, 1000) if event.kind == "breaker_opened"]
    assert opened.data["run_id"] == others[0].id
    await w.resolve(alerts[0])
    assert w.calls() == {"spread": 1, "gather": 1}


async def test_what_was_counted_outlives_a_restart_and_ends_with_the_window(world: MakeWorld) -> None:
    """The count is the store's; after ten minutes the cause is not the same any more."""
    w = await made(world, SPREAD)
    await w.post(w.alert("Slow", job_name="0"))
    await w.restart()
    await w.post(w.alert("Slow", job_name="1"))
    assert w.engine.controls.breaker_open
    await w.pass_time(601)
    assert [run.decision for run in (await w.post(w.alert("Slow", job_name="2"))).runs] == [Decision.BREAKER_OPEN]
    await w.engine.close_breaker("alice")
    await w.post(w.alert("Slow", job_name="3"))
    assert not w.engine.controls.breaker_open
    assert nodes_capped(w) == {*CLUSTER[:10], *CLUSTER[30:40]}


async def test_nodes_of_jobs_count_for_runs_on_nodes(world: MakeWorld) -> None:
    """And the other way round: a machine is a machine. One that was touched already adds nothing."""
    on_nodes = "{playbook: on, on: {alert: Hot}, target: node, steps: [{action: test.other}]}"
    w = await made(world, SPREAD, on_nodes)
    await w.post(w.alert("Slow", job_name="0"))
    for number in (3, 10, 11, 12, 13, 14, 3):
        await w.post(w.alert("Hot", node=f"n{number}", time=str(w.clock.now())))
        await w.pass_time(1)
    assert not w.engine.controls.breaker_open
    admission = await w.post(w.alert("Hot", node="n15"))
    assert [run.decision for run in admission.runs] == [Decision.BREAKER_OPEN]


async def test_a_server_that_was_killed_before_the_act_counts_its_nodes_once(world: MakeWorld) -> None:
    """What is on record goes on under the same id; the breaker, which opened meanwhile, holds back only what is new."""
    w = await made(world, SPREAD)
    w.actions["spread"].outcomes.append("hang")
    await w.post(w.alert("Slow", job_name="0"))
    await w.post(w.alert("Slow", job_name="1"))
    assert w.engine.controls.breaker_open
    await w.restart()
    first, second = await w.runs()
    assert (first.status, second.decision) == (Status.SUCCEEDED, Decision.BREAKER_OPEN)
    assert len({call.command_id for call in w.actions["spread"].calls}) == 1


async def test_a_run_that_has_begun_fails_at_the_step_that_would_touch_too_many(world: MakeWorld) -> None:
    """It has acted, so it did start: its own rules for a failure hold, and people are told."""
    begun = SPREAD.replace("steps:", "steps:\n  - {id: first, action: test.cap, undo: on_failure}")
    w = await made(world, begun + "on_failure: [{action: test.tell}]\n")
    await w.post(w.alert("Slow", job_name="0"), w.alert("Slow", job_name="1"))
    await w.pass_time(60)
    _, barred = await w.runs()
    assert (barred.status, barred.decision) == (Status.FAILED, Decision.STARTED)
    assert barred.steps[1].status is StepStatus.FAILED
    assert "with 10 more it would be" in barred.message
    assert w.calls() == {"cap": 2, "spread": 1, "tell": 1, "uncap": 1}


async def test_a_run_goes_on_at_the_nodes_that_it_has_touched(world: MakeWorld) -> None:
    """Neither an open breaker nor the time since then holds back what was begun there; it counts anew."""
    twice = SPREAD + "  - {wait_for: resolved, timeout: 20m, on_timeout: continue}\n  - {action: test.spread}\n"
    on_node = """
playbook: on
on: {alert: Hot}
target: node
steps:
  - {action: test.cap}
  - {wait_for: resolved, timeout: 20m, on_timeout: continue}
  - {action: test.other}
"""
    w = await made(world, twice, on_node)
    await w.post(w.alert("Slow", job_name="0"), w.alert("Hot", node="n20"))
    await w.post(w.alert("Slow", job_name="1"))
    assert w.engine.controls.breaker_open
    await w.pass_time(1300)
    assert w.calls() == {"spread": 2, "cap": 1, "other": 1}
    window = w.clock.now() - timedelta(minutes=10)
    assert await w.store.transact(lambda tx: tx.nodes_acted_on(window)) == {*CLUSTER[:10], "n20"}


async def test_what_was_approved_late_is_counted_when_it_acts(world: MakeWorld) -> None:
    """Runs that were admitted an hour apart, and are approved in one minute, act in one minute."""
    w = world(
        "{playbook: on, on: {alert: Hot}, target: node, steps: [{action: test.cap}]}",
        mode="approve",
        breaker_share=0.5,
        breaker_min_nodes=1,
    )
    for number in range(4):
        await w.post(w.alert(node=f"n{number}"))
        await w.pass_time(3600)
    for run in await w.runs():
        await w.engine.order(run.id, OrderKind.APPROVE, "bob")
        await w.pass_time(1)
    assert w.calls() == {"cap": 2}
    assert ended(await w.runs()) == [("succeeded", "started")] * 2 + [("not_started", "breaker_open")] * 2


@pytest.mark.parametrize(("action", "acts"), [("test.look", 5), ("test.cap", 5)])
async def test_what_touches_no_node_is_not_counted(world: MakeWorld, action: str, acts: int) -> None:
    """Reading all nodes of a job, or a command to the job itself: no machine is changed."""
    w = await made(world, SPREAD.replace("test.spread, undo: on_resolve", action))
    await w.post(*(w.alert("Slow", job_name=str(job)) for job in range(5)))
    assert w.calls() == {action.removeprefix("test."): acts}
    assert all(run.touched == () for run in await w.runs())


async def test_an_action_of_another_package_says_what_it_touches(world: MakeWorld) -> None:
    """By ``touches``; what cannot be counted is not done."""
    remote = """
playbook: remote
on: {alert: Far}
target: cluster
steps:
  - {action: test.remote, with: {amount: "{{ labels.amount }}", on: [n1, n2, n3]}}
"""
    w = await made(world, remote, breaker_share=0.05)
    with capture_logs() as logged:
        await w.post(w.alert("Far", amount="-1"))
    assert [each for each in logged if each["event"].startswith("action does not say") and each["exc_info"]]
    failed = await w.run()
    assert failed.message.endswith("action test.remote does not say which nodes it touches: LookupError: a bug")
    await w.post(w.alert("Far", amount="1"))
    assert w.engine.controls.breaker_open
    assert w.calls() == {}


ON_NODES = "{playbook: on, on: {alert: Hot}, target: node, steps: [{action: test.cap}]}"


async def opened(world: MakeWorld, **limits: Any) -> World:
    """Four nodes were acted on, the fifth opened the breaker."""
    w = await made(world, ON_NODES, **{"breaker_share": 0.08, **limits})
    await w.post(*(w.alert("Hot", node=f"n{number}") for number in range(5)))
    assert w.engine.controls.breaker_open
    assert w.calls() == {"cap": 4}
    await w.pass_time(20)
    return w


@pytest.mark.parametrize("restarts", [False, True])
async def test_closing_begins_the_count_again(world: MakeWorld, restarts: bool) -> None:
    """The next alert does not open it again: as many nodes as ever may be acted on, and then it opens for these."""
    w = await opened(world)
    await w.engine.close_breaker("alice")
    if restarts:
        await w.restart(after=1)
    await w.pass_time(5)
    await w.post(*(w.alert("Hot", node=f"n{number}") for number in range(5, 9)))
    assert not w.engine.controls.breaker_open
    assert w.calls() == {"cap": 8}
    await w.post(w.alert("Hot", node="n9"))
    assert w.engine.controls.breaker_open
    assert w.engine.controls.breaker_reason is not None
    assert w.engine.controls.breaker_reason.startswith("4 of 50 known nodes were acted on")
    assert w.calls() == {"cap": 8}


async def test_a_resume_while_the_breaker_is_closed_forgets_nothing(world: MakeWorld) -> None:
    """Nobody has looked at what it counted, so that still counts."""
    w = await made(world, ON_NODES, breaker_share=0.08)
    await w.post(*(w.alert("Hot", node=f"n{number}") for number in range(4)))
    await w.engine.close_breaker("alice")
    await w.pass_time(5)
    await w.post(w.alert("Hot", node="n4"))
    assert w.engine.controls.breaker_open


async def test_a_run_from_before_the_closing_counts_when_it_acts_after_it(world: MakeWorld) -> None:
    """It was admitted before, but touches its node now."""
    waiting = """
playbook: waiting
on: {alert: Slow}
target: node
steps:
  - {wait_for: resolved, timeout: 2m, on_timeout: continue}
  - {action: test.other}
"""
    w = await made(world, ON_NODES, waiting, breaker_share=0.06)
    await w.post(*(w.alert("Slow", node=f"n{number}") for number in (20, 21)))
    await w.post(w.alert("Hot", node="n0"), w.alert("Hot", node="n1"))
    assert w.engine.controls.breaker_open
    await w.engine.close_breaker("alice")
    await w.pass_time(121)
    assert w.calls() == {"cap": 1, "other": 2}
    await w.post(w.alert("Hot", node="n2"))
    assert not w.engine.controls.breaker_open
    await w.pass_time(1)
    await w.post(w.alert("Hot", node="n3"))
    assert w.engine.controls.breaker_open
    assert w.calls() == {"cap": 2, "other": 2}


@pytest.mark.usefixtures("usual_heartbeat")
async def test_a_clock_set_back_behind_the_closing_counts_too_much_and_not_too_little(world: MakeWorld) -> None:
    """What is acted on by the time that comes a second time counts, although the closing was later by that clock."""
    w = await opened(world)
    await w.engine.close_breaker("alice")
    await w.engine.start()
    w.clock.set_back(timedelta(seconds=300))
    await w.pass_time(11)
    assert w.engine.controls.breaker_closed_at is None
    await w.post(w.alert("Hot", node="n5"))
    assert w.engine.controls.breaker_open
