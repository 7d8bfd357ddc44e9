"""``guards.on_limited``: what is done where ``max_runs`` refuses a run, once within its time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.unit.engine.world import World
from trainmedic_core.target import Target
from trainmedic_server import errors
from trainmedic_server.domain.run import Decision, OrderKind, Run, Status
from trainmedic_server.engine.admission_changes import ByHand
from trainmedic_server.engine.manual_runs import StartOrder

MakeWorld = Callable[..., World]
HOUR = 3600

TEXT = """
playbook: clean
on: {alert: Full}
target: {node: "{{ labels.node }}"}
guards:
  max_runs: {count: 1, per: 2h}
  on_limited:
    - {id: tell, action: test.tell, retry: {attempts: 2, delay: 1m}}
    - {when: steps.tell.status == "failed", action: test.look}
steps:
  - {id: clean, action: test.cap, undo: on_resolve}
"""


async def limited(world: MakeWorld, text: str = TEXT, **limits: object) -> World:
    """Return a world whose playbook has used up its runs on n1."""
    at = world(text, **limits)
    await at.engine.start()
    await at.post(at.alert("Full", node="n1"))
    return at


async def last(at: World) -> Run:
    return (await at.runs())[-1]


async def test_the_first_refused_run_within_the_time_tells_and_no_other(world: MakeWorld) -> None:
    """It stays a decision not to start, with its reason; a new one tells when the time is over."""
    at = await limited(world)
    assert (await at.post(at.alert("Full", node="n2"))).runs[0].decision is Decision.RATE_LIMITED
    refused = await last(at)
    assert (refused.status, refused.decision) == (Status.NOT_STARTED, Decision.RATE_LIMITED)
    assert refused.message == "1 run in the last 2h, at most 1"
    assert refused.acted_at is None
    assert await at.story(refused.id) == ["rate_limited", "step_started", "step_succeeded", "step_skipped", "closed"]
    await at.post(at.alert("Full", node="n3"))
    assert at.calls() == {"cap": 1, "tell": 1}
    await at.pass_time(2 * HOUR)
    await at.post(at.alert("Full", node="n4"))
    await at.post(at.alert("Full", node="n5"))
    assert at.calls() == {"cap": 2, "tell": 2}


async def test_a_repeat_of_the_alert_tells_nothing(world: MakeWorld) -> None:
    """Neither while it is told, nor in a later window: the alert is the same."""
    at = await limited(
        world, TEXT.replace("count: 1, per: 2h", "count: 1, per: 2h, per_target: true"), max_age=timedelta(days=1)
    )
    at.actions["tell"].outcomes.append(timedelta(seconds=20))
    second = at.alert("Full", node="n1", mount="/data")
    assert (await at.post(second)).runs[0].decision is Decision.RATE_LIMITED
    assert (await at.post(second)).runs[0].decision is Decision.RATE_LIMITED
    await at.pass_time(HOUR)
    assert (await at.post(second)).runs[0].decision is Decision.RATE_LIMITED
    assert at.calls() == {"cap": 1, "tell": 1}
    assert len(await at.runs()) == 2
    await at.pass_time(HOUR)
    assert (await at.post(second)).runs[0].decision is Decision.STARTED
    assert at.calls() == {"cap": 2, "tell": 1}


async def test_with_per_target_each_target_is_told_of(world: MakeWorld) -> None:
    at = await limited(world, TEXT.replace("per: 2h", "per: 2h, per_target: true"))
    await at.post(at.alert("Full", node="n2"))
    for node in ("n1", "n2", "n1"):
        await at.post(at.alert("Full", node=node, mount="/data"))
    assert at.calls() == {"cap": 2, "tell": 2}


@pytest.mark.parametrize("failure", [errors.PermanentFailure("no answer"), errors.NotSetUp("no answer")])
async def test_a_failed_step_stands_behind_the_reason_of_the_refusal(world: MakeWorld, failure: Exception) -> None:
    """In the record and in the event of the end."""
    at = await limited(world)
    at.actions["tell"].outcomes.append(failure)
    await at.post(at.alert("Full", node="n2"))
    refused = await last(at)
    assert refused.message == "1 run in the last 2h, at most 1; step tell: no answer"
    record = await at.store.record(refused.id)
    assert record is not None
    assert record.events[-1].data["message"] == refused.message


@pytest.mark.parametrize("down", [0, 24 * HOUR])
async def test_a_restart_tells_once(world: MakeWorld, down: int) -> None:
    """Killed within a telling, or between two tries: it is finished, also after a long downtime."""
    at = await limited(world)
    at.actions["tell"].outcomes.append(errors.TemporaryFailure("no answer"))
    await at.post(at.alert("Full", node="n2"))
    assert (await last(at)).status is Status.WAITING
    await at.restart(down)
    await at.pass_time(HOUR)
    refused = await last(at)
    assert (refused.status, refused.decision) == (Status.NOT_STARTED, Decision.RATE_LIMITED)
    assert at.calls() == {"cap": 1, "tell": 2}


async def test_a_failed_step_is_told_after_the_reason(world: MakeWorld) -> None:
    at = await limited(world)
    at.actions["tell"].outcomes.append(errors.PermanentFailure("no channel"))
    await at.post(at.alert("Full", node="n2"))
    refused = await last(at)
    assert refused.status is Status.NOT_STARTED
    assert refused.message == "1 run in the last 2h, at most 1; step tell: no channel"
    assert at.calls() == {"cap": 1, "tell": 1, "look": 1}


async def test_cancelling_it_keeps_the_reason(world: MakeWorld) -> None:
    at = await limited(world)
    at.actions["tell"].outcomes.append(errors.TemporaryFailure("no answer"))
    await at.post(at.alert("Full", node="n2"))
    await at.engine.order((await last(at)).id, OrderKind.CANCEL, "ann", "")
    await at.pass_time(1)
    assert (await last(at)).message == "1 run in the last 2h, at most 1; cancelled by ann"


async def test_it_counts_as_no_run_and_locks_nothing(world: MakeWorld) -> None:
    """Neither for the guards, nor for the breaker, nor for other playbooks on the target."""
    other = "playbook: other\non: {alert: Other}\ntarget: {job: j}\nsteps: [{action: test.other}]"
    text = TEXT.replace('{node: "{{ labels.node }}"}', "{job: j}").replace("undo: on_resolve", "undo: never")
    text = text.replace("  on_limited", "  cooldown: 1s\n  max_concurrent: 1\n  queue: 1h\n  on_limited")
    at = world(text, other)
    await at.engine.start()
    await at.post(at.alert("Full", mount="a"))
    await at.pass_time(60)
    at.actions["tell"].outcomes.append(errors.TemporaryFailure("no answer"))
    await at.post(at.alert("Full", mount="b"))
    assert (await last(at)).waiting_on == "retry"
    await at.post(at.alert("Other"))
    await at.pass_time(1)
    assert at.calls() == {"cap": 1, "tell": 1, "other": 1}
    await at.pass_time(2 * HOUR)
    assert (await at.post(at.alert("Full", mount="c"))).runs[0].decision is Decision.STARTED


async def test_nothing_is_told_in_mode_observe_or_to_a_person_who_starts_it(world: MakeWorld) -> None:
    """Who starts it sees the refusal."""
    at = await limited(world)
    started = await at.engine.start_run(StartOrder("clean", Target.of_key("node:n2")), ByHand("ann"))
    assert started.run.decision is Decision.RATE_LIMITED
    assert at.calls() == {"cap": 1}
    observing = await limited(world, mode="observe")
    await observing.post(observing.alert("Full", node="n2"))
    assert observing.calls() == {}


async def test_a_group_tells_as_one_run(world: MakeWorld) -> None:
    text = TEXT.replace('{node: "{{ labels.node }}"}', "{nodes: {rack: r1}}").replace("undo: on_resolve", "undo: never")
    at = world(text, inventory={"attributes:n[1-3]": "rack=r1"}, breaker_min_nodes=9)
    await at.engine.start()
    first = at.alert("Full", mount="a")
    await at.post(first)
    await at.pass_time(60)
    at.actions["tell"].outcomes.append(timedelta(seconds=20))
    await at.post(at.alert("Full", mount="b"))
    await at.restart()
    await at.pass_time(60)
    refused = await last(at)
    assert (refused.status, refused.decision) == (Status.NOT_STARTED, Decision.RATE_LIMITED)
    assert at.calls() == {"cap": 3, "tell": 2}


async def test_a_further_run_that_is_refused_tells(world: MakeWorld) -> None:
    """``again`` waits until the guards allow it, and people know."""
    text = TEXT.replace("guards:", "guards:\n  again: {after: 10m, times: 5}")
    at = await limited(world, text)
    await at.pass_time(HOUR)
    assert at.calls() == {"cap": 1, "tell": 1}
    await at.pass_time(2 * HOUR)
    assert at.calls()["cap"] == 2
