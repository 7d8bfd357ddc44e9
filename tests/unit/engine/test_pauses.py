"""Pauses of a part, for a while, later, and again and again."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.unit.engine.books import CAP
from tests.unit.engine.world import World
from trainmedic_server import errors
from trainmedic_server.domain.pause import PauseOrder, Scope
from trainmedic_server.domain.run import Controls, Decision, Event, OrderKind, Status
from trainmedic_server.domain.topology import AgentTopology, ClusterNode, ClusterTopology, JobTopology, Pod, Topology

MakeWorld = Callable[..., World]

HOUR = timedelta(hours=1)
ON_JOB = """
playbook: on-job
on: {alert: Slow}
target: job
steps:
  - {id: ask, approve: "go on?"}
  - {id: act, action: test.other}
"""
ON_NODE = ON_JOB.replace("on-job", "on-node").replace("target: job", "target: node").replace("Slow", "Warm")


async def told(w: World, *kinds: str) -> list[tuple[str, str]]:
    """The kind and scope of the events of pauses."""
    events: list[Event] = await w.store.events_after(0, 1000)
    return [(event.kind, event.data["scope"]) for event in events if event.kind in kinds and event.run_id is None]


async def test_a_pause_of_a_node_holds_for_its_runs_alone_and_ends_by_itself(world: MakeWorld) -> None:
    """A repeat of the alert then starts what it kept from starting, and says who, until when and why."""
    w = world(CAP)
    await w.restart()
    await w.engine.pause("ann", PauseOrder(Scope(node="n1"), "new fans", length=2 * HOUR))
    held, other = w.alert(gpu="0", node="n1"), w.alert(gpu="0", node="n2")
    await w.post(held, other)
    runs = {run.target_key: run for run in await w.runs()}
    assert runs["gpu:n2/0"].status is Status.SUCCEEDED
    paused = runs["gpu:n1/0"]
    assert paused.decision is Decision.PAUSED
    assert paused.message.startswith("paused by ann for node n1 until 2")
    assert paused.message.endswith(": new fans")
    assert not w.engine.controls.paused
    await w.pass_time(7201)
    fresh = w.alert(gpu="1", node="n1")
    await w.post(fresh)
    assert w.calls() == {"cap": 2}
    await w.pass_time(20)
    assert await told(w, "pause_ordered", "resumed", "pause_ended") == [
        ("pause_ordered", "node n1"),
        ("pause_ended", "node n1"),
    ]
    assert w.engine.controls.pauses == ()


async def test_an_open_run_stands_still_until_the_pause_is_over(world: MakeWorld) -> None:
    """It goes on at the very end, without anybody, over a restart too."""
    w = world(ON_NODE, max_age=timedelta(hours=9))
    await w.post(w.alert("Warm", node="n1"))
    await w.engine.pause("ann", PauseOrder(Scope(playbook="on-*"), length=HOUR))
    run = await w.run()
    await w.engine.order(run.id, OrderKind.APPROVE, "bob")
    await w.pass_time(60)
    run = await w.run()
    assert (run.status, run.waiting_on, w.calls()) == (Status.WAITING, "resume", {})
    assert run.message.startswith("paused by ann for playbook on-* until ")
    await w.restart(after=600)
    await w.pass_time(3600 - 660 - 1)
    assert w.calls() == {}
    await w.pass_time(2)
    assert ((await w.run()).status, w.calls()) == (Status.SUCCEEDED, {"other": 1})


def topology_of(job: str, *nodes: str) -> Topology:
    placement = {job: {"placement": [{"rank": rank, "node": node} for rank, node in enumerate(nodes)]}}
    return Topology(jobs=JobTopology.of(placement, Topology().agents))


@pytest.mark.parametrize(
    ("scope", "alert", "labels", "held"),
    [
        (Scope(node="n2"), "Slow", {"job_name": "llm"}, True),
        (Scope(node="n3"), "Slow", {"job_name": "llm"}, False),
        (Scope(job="llm"), "Warm", {"node": "n1"}, True),
        (Scope(job="llm"), "Warm", {"node": "n3"}, False),
        (Scope(labels={"rack": "r3"}), "Warm", {"node": "n1", "rack": "r3"}, True),
        (Scope(labels={"rack": "r3"}), "Warm", {"node": "n1", "rack": "r4"}, False),
    ],
)
async def test_a_pause_holds_for_whatever_would_touch_what_is_paused(
    world: MakeWorld, scope: Scope, alert: str, labels: dict[str, str], held: bool
) -> None:
    """A job's run on a paused node, and a node's where a paused job runs."""
    w = world(ON_JOB, ON_NODE)
    await w.engine.stop()
    topology = topology_of("llm", "n1", "n2")
    w.engine = type(w.engine)(w.store, w.catalog, w.actions, w.clock, w.limits, w.metrics, lambda: topology, w.source)
    await w.engine.start()
    await w.engine.pause("ann", PauseOrder(scope))
    await w.post(w.alert(alert, **labels))
    run = await w.run()
    assert (run.decision is Decision.PAUSED) is held, run


@pytest.mark.parametrize("node", ["gpu-7", "gpu-7.site.example", "*.site.example"])
@pytest.mark.parametrize(("alert", "labels"), [("Slow", {"job_name": "llm"}), ("Warm", {"node": "gpu-7"})])
async def test_a_pause_of_a_node_holds_by_any_of_its_names(
    world: MakeWorld, node: str, alert: str, labels: dict[str, str]
) -> None:
    """Agents and Kubernetes may call it differently."""
    w = world(ON_JOB, ON_NODE)
    await w.engine.stop()
    pod = Pod("u1", "ml", "llm-0", "gpu-7.site.example", "llm")
    cluster = ClusterTopology((ClusterNode("gpu-7.site.example", ()),), {"u1": pod})
    topology = Topology(agents=AgentTopology.of({"gpu-7": {}}), cluster=cluster)
    w.engine = type(w.engine)(w.store, w.catalog, w.actions, w.clock, w.limits, w.metrics, lambda: topology, w.source)
    await w.engine.start()
    await w.engine.pause("ann", PauseOrder(Scope(node=node)))
    await w.post(w.alert(alert, **labels))
    assert (await w.run()).decision is Decision.PAUSED


async def test_a_window_that_comes_later_is_in_nobodys_way_before(world: MakeWorld) -> None:
    """And comes again; `resume` ends the one that is open, and not those to come."""
    w = world(CAP)
    await w.restart()
    starts_at = w.clock.now() + HOUR
    order = PauseOrder(Scope(node="n1"), "firmware", starts_at, HOUR, timedelta(days=1))
    _, pause = await w.engine.pause("ann", order)
    await w.post(w.alert(gpu="0", node="n1"))
    assert w.calls() == {"cap": 1}
    await w.pass_time(3615)
    await w.post(w.alert(gpu="1", node="n1"))
    assert w.calls() == {"cap": 1}
    await w.engine.resume("bob")
    await w.post(w.alert(gpu="2", node="n1"))
    assert w.calls() == {"cap": 2}
    await w.pass_time(24 * 3600)
    await w.post(w.alert(gpu="3", node="n1"))
    assert w.calls()["cap"] == 2
    assert await told(w, "pause_began", "resumed") == [
        ("pause_began", "node n1"),
        ("resumed", "node n1"),
        ("pause_began", "node n1"),
    ]
    await w.engine.resume("bob", pause.id)
    assert w.engine.controls.pauses == ()


async def test_a_window_that_is_open_when_it_is_ordered_is_told_of_when_it_comes_again(world: MakeWorld) -> None:
    """The first time the order says it."""
    w = world(CAP)
    await w.restart()
    await w.engine.pause("ann", PauseOrder(Scope(node="n1"), length=HOUR, every=timedelta(days=1)))
    await w.pass_time(25.5 * 3600)
    assert await told(w, "pause_ordered", "pause_began", "pause_ended") == [
        ("pause_ordered", "node n1"),
        ("pause_ended", "node n1"),
        ("pause_began", "node n1"),
        ("pause_ended", "node n1"),
    ]


async def test_a_playbook_that_is_to_observe_only_records_what_it_would_do(world: MakeWorld) -> None:
    """Until the order ends, and says who gave it."""
    w = world(CAP)
    await w.engine.pause("ann", PauseOrder(Scope(playbook="cap"), "twice tonight", length=HOUR, observe=True))
    await w.post(w.alert(gpu="0", node="n1"))
    run = await w.run()
    assert (run.status, run.decision, w.calls()) == (Status.OBSERVED, Decision.OBSERVE_ONLY, {})
    assert run.message.startswith("would have applied test.cap; observe only, said by ann until ")
    await w.engine.resume("bob")
    assert w.engine.controls.pauses
    await w.pass_time(3601)
    await w.post(w.alert(gpu="1", node="n1"))
    assert w.calls() == {"cap": 1}


async def test_the_same_pause_again_takes_the_place_of_the_first(world: MakeWorld) -> None:
    """Whoever repeats a request, or wants more time, does not have to end two."""
    w = world(CAP)
    _, first = await w.engine.pause("ann", PauseOrder(Scope(node="n1"), length=HOUR))
    await w.engine.pause("bob", PauseOrder(Scope(node="n1"), length=2 * HOUR))
    (pause,) = w.engine.controls.pauses
    assert (pause.id, pause.by, pause.ends_at) == (first.id, "bob", w.clock.now() + 2 * HOUR)
    with pytest.raises(errors.NotFound, match="there is no pause of node n2"):
        await w.engine.resume("ann", scope=Scope(node="n2"))
    with pytest.raises(errors.NotFound, match="there is no pause deadbeef"):
        await w.engine.resume("ann", "deadbeef")
    await w.engine.resume("ann", scope=Scope(node="n1"))
    assert w.engine.controls.pauses == ()


async def test_nothing_is_told_of_what_was_not_ended(world: MakeWorld) -> None:
    """To resume what was not paused is no event."""
    w = world(CAP)
    await w.restart()
    await w.engine.resume("ann")
    await w.engine.close_breaker("ann")
    kinds = {event.kind for event in await w.store.events_after(0, 1000)}
    assert kinds == {"server_started"}


async def test_a_server_that_an_earlier_release_paused_stays_paused(world: MakeWorld) -> None:
    """It knew no scopes; a person resumes it as before."""
    w = world(CAP)
    now = w.clock.now()
    await w.store.transact(lambda tx: tx.save_controls(Controls(paused=True, paused_by="ann", paused_at=now)))
    await w.restart()
    await w.post(w.alert(gpu="0", node="n1"))
    assert (await w.run()).message == "paused by ann"
    assert (w.engine.controls.paused, w.engine.controls.paused_by) == (True, "ann")
    await w.engine.resume("bob")
    assert (w.engine.controls.paused, w.engine.controls.pauses) == (False, ())
