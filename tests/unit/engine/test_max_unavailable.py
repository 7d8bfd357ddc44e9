"""``rollout.max_unavailable``: how many nodes of the pool may be out of service at a start, whoever took them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest

from tests.unit.engine.test_groups import CAP, LARGE, RACK, members
from tests.unit.engine.world import World
from trainmedic_core.target import Target
from trainmedic_server.domain import inventory
from trainmedic_server.domain.node_names import NodeNames
from trainmedic_server.domain.playbook import Rollout
from trainmedic_server.domain.run import OrderKind, Status
from trainmedic_server.domain.selectors import Selector
from trainmedic_server.domain.topology import ClusterNode, ClusterTopology, SlurmTopology, Topology
from trainmedic_server.domain.upcoming import clock
from trainmedic_server.engine import capacity
from trainmedic_server.engine.capacity import Capacity

MakeWorld = Callable[..., World]
SINGLE = "playbook: one\non: {alert: Hot}\ntarget: {node: '{{ labels.node }}'}\nsteps: [{action: test.other}]"


def limited(text: str, serial: str = "100%") -> str:
    return f"{CAP}\nrollout: {{serial: {serial}, max_unavailable: {text}}}\n"


def cluster(**states: str) -> ClusterTopology:
    """The nodes of the rack, of which these are out of service."""
    return ClusterTopology(
        tuple(ClusterNode(f"n{number}", (), {}, states.get(f"n{number}", "")) for number in range(1, 9))
    )


async def at_work(at: World) -> list[str]:
    return [run.target_key for run in await members(at, (await at.runs())[0]) if run.is_open]


async def test_members_wait_for_those_in_flight(world: MakeWorld) -> None:
    """Two of eight at a time, though the batch is the whole list; each has some time to show in the topology."""
    at = world(limited("25%"), inventory=RACK, **LARGE)
    await at.engine.start()
    at.actions["cap"].outcomes.extend([timedelta(seconds=5), timedelta(seconds=9)] * 4)
    await at.post(at.alert("PDU", rack="r1"))
    parent = await at.run()
    assert await at_work(at) == ["node:n1", "node:n2"]
    assert parent.message == "its members are at work: 2 of 8 nodes are unavailable, at most 2 may be"
    await at.pass_time(14)
    assert await at_work(at) == []
    await at.pass_time(2)
    assert await at_work(at) == ["node:n3"]
    await at.pass_time(120)
    parent = await at.run()
    assert (parent.status, parent.message) == (Status.SUCCEEDED, "8 members: 8 succeeded")
    assert "rollout_held" not in await at.story()


async def test_nodes_that_others_took_count(world: MakeWorld) -> None:
    """A cordoned node and one that does not answer leave no room, until one of them returns."""
    at = world(limited("2"), inventory=RACK, **LARGE)
    at.cluster = cluster(n5="cordoned", n8="not ready")
    await at.engine.start()
    await at.post(at.alert("PDU", rack="r1"))
    await at.pass_time(300)
    parent = await at.run()
    assert parent.message == "no further member starts: 2 of 8 nodes are unavailable, at most 2 may be"
    assert at.calls() == {"cap": 2}, "those two nodes are out of service anyway"
    assert "rollout_held" in await at.story()
    at.cluster = cluster(n8="not ready")
    await at.pass_time(61)
    assert at.calls()["cap"] >= 3
    await at.pass_time(600)
    assert (await at.run()).message == "8 members: 8 succeeded"


async def test_nodes_of_other_runs_count(world: MakeWorld) -> None:
    """A run of another playbook that has acted and is open."""
    single = SINGLE.replace("[{action: test.other}]", "[{action: test.other}, {wait: 1h}]")
    at = world(limited("1"), single, inventory=RACK, **LARGE)
    await at.engine.start()
    await at.post(at.alert("Hot", node="n7"))
    await at.post(at.alert("PDU", rack="r1"))
    await at.pass_time(600)
    assert "cap" not in at.calls(), "the one node is at work for an hour"
    (group,) = [run for run in await at.runs() if run.is_group]
    assert group.message == "no further member starts: 1 of 8 nodes are unavailable, at most 1 may be"
    await at.pass_time(3600)
    assert at.calls()["cap"] == 8, [(r.target_key, r.status, r.message) for r in await members(at, group)]


async def test_an_open_breaker_is_awaited_at_rest(world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time at which members would have settled has passed by then, and is not waited for again and again."""
    at = world(limited("25%"), SINGLE, inventory=RACK, breaker_min_nodes=9, breaker_share=0.01)
    await at.engine.start()
    await at.post(at.alert("PDU", rack="r1"))
    for number in range(20, 28):
        await at.post(at.alert("Hot", node=f"n{number}"))
    assert at.engine.controls.breaker_open
    await at.pass_time(9)
    slept: list[datetime] = []
    sleep_until = at.clock.sleep_until

    async def counted(when: datetime) -> None:
        slept.append(when)
        await sleep_until(when)

    monkeypatch.setattr(at.clock, "sleep_until", counted)
    await asyncio.sleep(1)
    for _ in range(200):
        await asyncio.sleep(0)
    assert len(slept) < 5, slept
    (parent,) = [run for run in await at.runs() if run.is_group]
    assert parent.message.startswith("no further member starts: ")
    await at.engine.close_breaker("ann")
    await at.pass_time(600)
    assert (await at.run(parent.id)).message == "8 members: 8 succeeded"


async def test_zero_starts_only_on_nodes_that_are_out_already(world: MakeWorld) -> None:
    """It is never raised to one if it is written."""
    at = world(limited("0"), inventory=RACK, **LARGE)
    at.cluster = cluster(n5="cordoned")
    await at.engine.start()
    await at.post(at.alert("PDU", rack="r1"))
    await at.pass_time(600)
    assert [run.target_key for run in await members(at)] == ["node:n5"]


async def test_what_a_scheduler_says_counts(world: MakeWorld) -> None:
    """While it does not answer, no member starts: how many nodes are out of service is not known."""
    at = world(limited("1"), inventory=RACK, **LARGE)
    nodes = (ClusterNode("n3", (), {}, "DRAIN"), ClusterNode("n4", ()))
    at.slurm = SlurmTopology(nodes)
    await at.engine.start()
    await at.post(at.alert("PDU", rack="r1"))
    await at.pass_time(1)
    assert [run.target_key for run in await members(at)] == ["node:n3"]
    since = at.clock.now()
    at.slurm = SlurmTopology(nodes).unanswered(since)
    await at.pass_time(61)
    unknown = f"the state of the nodes is not known since {clock(since)}: Slurm does not answer"
    assert (await at.run()).message == f"no further member starts: {unknown}"
    at.slurm = SlurmTopology()
    await at.pass_time(600)
    assert (await at.run()).message == "8 members: 8 succeeded"


async def test_a_wait_for_room_ends_with_the_run(world: MakeWorld) -> None:
    """A person can cancel it, and a restart continues it."""
    at = world(limited("1"), inventory=RACK, **LARGE)
    at.cluster = cluster(n1="cordoned", n2="cordoned")
    await at.engine.start()
    await at.post(at.alert("PDU", rack="r1"))
    await at.pass_time(90)
    await at.restart(after=2)
    await at.pass_time(90)
    parent = await at.run()
    assert parent.message == "no further member starts: 2 of 8 nodes are unavailable, at most 1 may be"
    await at.engine.order(parent.id, OrderKind.CANCEL, "ann")
    await at.pass_time(1)
    assert (await at.run()).message == "cancelled by ann; 8 members: 2 succeeded, 6 not begun"


async def test_a_kill_leaves_no_more_at_work(world: MakeWorld) -> None:
    """The next server counts the members in flight from the store."""
    for seconds in (0, 3, 5, 16, 17, 22):
        at = world(limited("2"), inventory=RACK, **LARGE)
        await at.engine.start()
        at.actions["cap"].outcomes.extend([timedelta(seconds=5)] * 30)
        await at.post(at.alert("PDU", rack="r1"))
        await at.pass_time(seconds)
        await at.restart(after=1)
        most = 0
        for _ in range(90):
            await at.pass_time(1)
            most = max(most, len(await at_work(at)))
        assert most <= 2, seconds
        assert (await at.run()).message == "8 members: 8 succeeded"


async def test_explain_shows_the_room(world: MakeWorld) -> None:
    """As the topology has it now, with the reasons."""
    at = world(limited("25%"), inventory=RACK, **LARGE)
    at.cluster = cluster(n5="cordoned")
    await at.engine.start()
    ((one,),) = [each.playbooks for each in await at.engine.explain([at.alert("PDU", rack="r1")])]
    assert one.guards[-1] == "max_unavailable: 1 of 8 nodes are unavailable, at most 2 may be (n5: cordoned)"


def room(text: str | int, topology: Topology, *more: str) -> Capacity:
    selector = Selector.of(Target.of_key("gpus:rack=r1"))
    rules = Rollout.model_validate({"max_unavailable": text})
    gone = [Target.of_key(key) for key in more]
    made = capacity.of(rules, selector.target, gone, topology)
    assert isinstance(made, Capacity), made
    return made


def test_the_number_is_of_the_pools_nodes() -> None:
    """Percentages round down, but to 1 at least; a member that is gone is missing."""
    topology = Topology(inventory.parse({"attributes:n[1-9]": "rack=r1", "gpus:n[1-9]": "8"}))
    assert [room(text, topology).allowed for text in ("5%", "25%", "100%", 3, 0, "0%")] == [1, 2, 9, 3, 0, 0]
    lost = room("25%", topology, "gpu:n10/0", "gpu:n1/3")
    assert (lost.pool, lost.out) == (10, {"n10": "it is gone"})


def test_a_node_whose_agent_is_silent_counts_once() -> None:
    """Only the cluster lists it then, by another name than the members and runs of before."""
    nodes = tuple(ClusterNode(f"n{number}.site.example", ()) for number in (1, 2, 3))
    topology = Topology(cluster=ClusterTopology(nodes), remembered=NodeNames(frozenset({"n1", "n2", "n3"})))
    rules, rack = (
        Rollout.model_validate({"max_unavailable": 1}),
        [Target.of_key(f"node:n{number}") for number in (1, 2)],
    )
    made = capacity.of(rules, Target.of_key("nodes:all"), rack, topology, (), {"n3"})
    assert isinstance(made, Capacity)
    assert (made.pool, made.others) == (3, {"n3.site.example"})
    assert capacity.fitting(made, ["node:n3"], 1, topology) == []


def test_gpus_of_one_node_take_one_node() -> None:
    """The second GPU of a node that is at work takes nothing more away."""
    slurm = SlurmTopology((ClusterNode("n3", (), {}, "DOWN"),))
    topology = Topology(inventory.parse({"attributes:n[1-3]": "rack=r1", "gpus:n[1-3]": "2"}), slurm=slurm)
    ordered = [f"gpu:n{node}/{gpu}" for node in (1, 2, 3) for gpu in (0, 1)]
    there = room(2, topology)
    assert capacity.fitting(there, ordered, 9, topology) == ["gpu:n1/0", "gpu:n1/1", "gpu:n3/0", "gpu:n3/1"]
    assert capacity.fitting(there, ordered, 1, topology) == ["gpu:n1/0"]
    assert str(there.after(["gpu:n1/0"], topology)) == "2 of 3 nodes are unavailable, at most 2 may be"


def test_a_source_that_does_not_answer_leaves_it_open() -> None:
    """No member starts then."""
    topology = Topology(inventory.parse({"attributes:n1": "rack=r1"}), cluster=ClusterTopology(answers=False))
    rules = Rollout.model_validate({"max_unavailable": 1})
    made = capacity.of(rules, Target.of_key("nodes:rack=r1"), [], topology)
    assert made == "the state of the nodes is not known: Kubernetes does not answer"
