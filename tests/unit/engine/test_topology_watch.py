"""Where jobs run, as kept from presences: what is known, for how long, and what nonsense does to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

from trainmedic_core import gpu_names
from trainmedic_server import telemetry
from trainmedic_server.domain import inventory
from trainmedic_server.domain.node_names import NodeNames
from trainmedic_server.domain.topology import ClusterNode, ClusterTopology, Pod
from trainmedic_server.engine.topology_watch import (
    FORGET_AFTER,
    REFRESH_EVERY,
    RENEW_AFTER_FAILURE,
    RENEW_EVERY,
    TopologyWatch,
)
from trainmedic_server.errors import BusUnavailable
from trainmedic_server.ports.outside import CommandBus, Presence
from trainmedic_server.simulation import virtual_time
from trainmedic_server.simulation.virtual_time import BEGINNING, VirtualClock

A, B = "GPU-aaaa0000-0000-0000-0000-000000000000", "GPU-bbbb0000-0000-0000-0000-000000000000"


@dataclass
class Presences:
    """What is in Redis."""

    of_jobs: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    of_agents: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    is_away: bool = False
    doubted: set[str] = field(default_factory=set)
    """The agents that are not believed."""
    asked: int = 0

    async def jobs(self) -> list[Presence]:
        self.asked += 1
        if self.is_away:
            raise BusUnavailable("away")
        return [Presence(name, BEGINNING, details) for name, details in self.of_jobs.items()]

    async def agents(self) -> list[Presence]:
        return [
            Presence(name, BEGINNING, details, doubt="it is not signed" if name in self.doubted else None)
            for name, details in self.of_agents.items()
        ]


@dataclass
class LatePresences(Presences):
    """Answers the first reading once it may, with the jobs of its beginning."""

    is_read: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def jobs(self) -> list[Presence]:
        found = await super().jobs()
        if self.asked == 1:
            self.is_read.set()
            await self.may_answer.wait()
        return found


PODS = {uid: Pod(uid, "ml", f"{job}-0", "n1", job) for uid, job in (("u1", "llm-1"), ("u2", "llm-2"))}
CLUSTER = ClusterTopology(
    (ClusterNode("wrong", ("10.0.0.7",)),), PODS | {"u3": Pod("u3", "monitoring", "dcgm", "n1", None)}
)
"""Two jobs' pods, and one of no job."""


def made(bus: Presences, wanted: bool = True, is_needed: Callable[[], bool] | None = None) -> TopologyWatch:
    written = inventory.parse({"10.0.0.7": "n7"})
    bus_port = cast(CommandBus, bus)
    is_needed = is_needed or (lambda: wanted)
    return TopologyWatch(bus_port, VirtualClock(), telemetry.Metrics(), is_needed, written, lambda: CLUSTER)


def reported_on(watch: TopologyWatch, node: str) -> set[str]:
    return set(watch.topology().jobs_on_node(node).reported)


def gpu(uuid: str, index: int, *pods: Any) -> dict[str, Any]:
    return {"index": index, "uuid": uuid, "pci_bus_id": f"0000:1{index}:00.0", "pods": list(pods)}


async def test_the_jobs_on_a_gpu_are_known_by_each_of_its_names() -> None:
    """From what the job says, and from the pods that the agent sees; those of no job count for nothing."""
    bus = Presences({"llm": {"placement": [{"rank": 0, "node": "n1", "gpu": A.upper()}]}})
    bus.of_agents["n1"] = {"gpus": [gpu(A, 0, "u1", "u3"), gpu(B, 1, "u1", "u2", "gone")]}
    watch = made(bus)
    await watch.refresh()
    topology = watch.topology()
    for key in (A.lower().removeprefix("gpu-"), "n1/0", "n1/0000:10:00.0"):
        assert topology.jobs_on_gpu(key) == ({"llm"}, {"llm-1"})
    assert topology.jobs_on_gpu("n1/1") == (set(), {"llm-1", "llm-2"})
    assert topology.jobs_on_node("n1") == ({"llm"}, {"llm-1", "llm-2"})
    assert topology.node_at("10.0.0.7") == "n7"


async def test_a_gpu_that_two_jobs_name_has_both() -> None:
    """Which one is meant is not for this to say."""
    placed = {"placement": [{"rank": 0, "node": "n1", "gpu": A}]}
    watch = made(Presences({"one": placed, "two": placed}))
    await watch.refresh()
    assert watch.topology().jobs_on_gpu(gpu_names.key(A)).reported == {"one", "two"}


async def test_nonsense_in_a_presence_is_passed_over() -> None:
    """Whoever can write to Redis writes it; the rest is known all the same."""
    bus = Presences({"bad": {"placement": [{"node": 7}, "?", None, {"node": "n1", "gpu": ["x"]}]}})
    bus.of_jobs |= {"worse": {"placement": {"rank": 0}}, "good": {"placement": [{"rank": 0, "node": "n2", "gpu": B}]}}
    entries = [1, {"uuid": 3}, {"uuid": B, "index": "x", "pods": 9}, {"uuid": A, "index": True, "pods": ["u1", 4]}]
    bus.of_agents = {"n2": {"gpus": entries}, "n3": {"gpus": "none"}, "n4": {}}
    watch = made(bus)
    await watch.refresh()
    assert reported_on(watch, "n1") == {"bad"}
    assert watch.topology().jobs_on_gpu(gpu_names.key(B)).reported == {"good"}
    assert watch.topology().jobs_on_gpu(gpu_names.key(A)).observed == {"llm-1"}


async def test_what_changes_is_known_with_the_next_look() -> None:
    """A job that has moved, a process that has ended."""
    bus = Presences({"llm": {"placement": [{"rank": 0, "node": "n1"}]}}, {"n1": {"gpus": [gpu(A, 0, "u1")]}})
    watch = made(bus)
    await watch.refresh()
    before = watch.topology()
    assert (before.jobs_on_node("n1").reported, before.jobs_on_gpu("n1/0").observed) == ({"llm"}, {"llm-1"})
    bus.of_jobs["llm"] = {"placement": [{"rank": 0, "node": "n2"}]}
    bus.of_agents["n1"] = {"gpus": [gpu(A, 0)]}
    await watch.refresh()
    assert reported_on(watch, "n2") == {"llm"}
    assert not reported_on(watch, "n1")
    assert not watch.topology().jobs_on_gpu("n1/0").observed


async def test_an_older_reading_does_not_replace_a_newer_one() -> None:
    """Redis answers the first reading late, after the job has moved and an alert has had it read again."""
    bus = LatePresences({"llm": {"placement": [{"rank": 0, "node": "n1"}]}})
    watch = made(bus)
    older = asyncio.create_task(watch.refresh())
    await bus.is_read.wait()
    bus.of_jobs["llm"] = {"placement": [{"rank": 0, "node": "n2"}]}
    newer = asyncio.create_task(watch.refresh(recent=True))
    await asyncio.wait([newer], timeout=0.1)
    bus.may_answer.set()
    await asyncio.gather(older, newer)
    assert (reported_on(watch, "n1"), reported_on(watch, "n2")) == (set(), {"llm"})


async def test_a_reading_that_began_before_all_was_forgotten_is_void() -> None:
    bus, needed = LatePresences({"llm": {"placement": [{"rank": 0, "node": "n1"}]}}), True
    watch = made(bus, is_needed=lambda: needed)
    older = asyncio.create_task(watch.refresh())
    await bus.is_read.wait()
    needed = False
    await watch.refresh()
    bus.may_answer.set()
    await older
    assert not reported_on(watch, "n1")
    needed = True
    await watch.refresh()
    assert reported_on(watch, "n1") == {"llm"}


async def test_nothing_is_read_while_no_playbook_asks() -> None:
    """An idle server leaves Redis alone."""
    bus = Presences({"llm": {"placement": [{"rank": 0, "node": "n1"}]}})
    watch = made(bus, wanted=False)
    await watch.refresh()
    assert bus.asked == 0
    assert not reported_on(watch, "n1")


def test_what_cannot_be_read_anew_is_forgotten_after_a_while() -> None:
    """A short absence of Redis changes nothing; after a long one a target is refused, not guessed."""

    async def main() -> None:
        bus = Presences({"llm": {"placement": [{"rank": 0, "node": "n1"}]}})
        watch, clock = made(bus), VirtualClock()
        watching = asyncio.create_task(watch.watch())
        await clock.sleep_until(BEGINNING + timedelta(seconds=1))
        assert reported_on(watch, "n1") == {"llm"}
        bus.is_away = True
        await clock.sleep_until(clock.now() + FORGET_AFTER - 2 * REFRESH_EVERY)
        assert reported_on(watch, "n1") == {"llm"}
        await clock.sleep_until(clock.now() + 4 * REFRESH_EVERY)
        assert not reported_on(watch, "n1")
        bus.is_away = False
        await clock.sleep_until(clock.now() + 2 * REFRESH_EVERY)
        assert reported_on(watch, "n1") == {"llm"}
        watching.cancel()
        await asyncio.wait([watching])

    virtual_time.run(main())


def test_no_node_is_unknown_before_the_agents_were_read_nor_long_after() -> None:
    """A server that has just started, or that has lost Redis, refuses nothing for what it cannot know."""

    async def main() -> None:
        bus = Presences(of_agents={"n1": {"gpus": []}})
        watch, clock = made(bus), VirtualClock()
        assert not watch.topology().knows_all_nodes
        watching = asyncio.create_task(watch.watch())
        await clock.sleep_until(BEGINNING + timedelta(seconds=1))
        assert watch.topology().knows_all_nodes
        bus.is_away = True
        await clock.sleep_until(clock.now() + FORGET_AFTER + 3 * REFRESH_EVERY)
        assert not watch.topology().knows_all_nodes
        watching.cancel()
        await asyncio.wait([watching])

    virtual_time.run(main())


async def test_an_agent_that_is_not_believed_makes_no_node_known() -> None:
    """Anybody who can write to Redis could; one that was believed a moment ago is there still."""
    bus = Presences(of_agents={"n1": {"gpus": []}, "forged": {}, "overwritten": {"gpus": []}})
    bus.doubted = {"forged", "overwritten"}
    watch = made(bus)
    await watch.refresh()
    assert watch.topology().agents.names.names == {"n1", "overwritten"}


async def test_nodes_whose_agents_are_gone_are_known() -> None:
    """As long as they are remembered."""
    watch = made(Presences(of_agents={"n1": {"gpus": []}}))
    watch.remembered = lambda: NodeNames(frozenset({"n1", "n0"}))
    await watch.refresh()
    assert watch.topology().known.find("n0.example.org") == {"n0"}


async def _an_agent_that_has_just_connected_is_found() -> None:
    clock, bus = VirtualClock(), Presences(of_agents={"n1": {}})
    watch = TopologyWatch(
        cast(CommandBus, bus), clock, telemetry.Metrics(), lambda: True, inventory.parse({}), ClusterTopology
    )
    await watch.renew()
    assert bus.asked == 0, "nothing is refused before the first reading"
    await watch.refresh()
    bus.of_agents["n2"] = {}
    await watch.renew()
    assert (bus.asked, watch.topology().known.knows("n2")) == (2, True)
    await watch.renew()
    assert bus.asked == 2, "rarely"
    await clock.sleep_until(clock.now() + RENEW_EVERY)
    bus.is_away = True
    await watch.renew()
    await clock.sleep_until(clock.now() + RENEW_AFTER_FAILURE - RENEW_EVERY)
    await watch.renew()
    assert bus.asked == 3, "no delivery waits again soon for a Redis that does not answer"


def test_an_agent_that_has_just_connected_is_found() -> None:
    """An alert on its node is not refused because the last reading was earlier; Redis is asked rarely for that."""
    virtual_time.run(_an_agent_that_has_just_connected_is_found())


def test_an_alert_does_not_wait_for_the_reading_before() -> None:
    """Each takes most of the time that a delivery may wait."""

    class Slow(Presences):
        async def jobs(self) -> list[Presence]:
            found = await super().jobs()
            await asyncio.sleep(0.3)
            return found

    async def main() -> None:
        bus = Slow({"llm": {"placement": [{"rank": 0, "node": "n1"}]}})
        watch = made(bus)
        await watch.refresh()
        refreshing = asyncio.create_task(watch.refresh())
        await asyncio.sleep(0.02)
        bus.of_jobs["new"] = {"placement": [{"rank": 0, "node": "n9"}]}
        await watch.renew()
        assert reported_on(watch, "n9") == {"new"}
        await refreshing
        assert reported_on(watch, "n9") == {"new"}

    virtual_time.run(main())


def test_what_fails_to_be_read_is_forgotten_too() -> None:
    """Not only without Redis: after a minute nobody knows where a job runs."""

    class Unreadable(Presences):
        async def agents(self) -> list[Presence]:
            if self.is_away:
                raise ValueError("a presence of another kind")
            return await super().agents()

        async def jobs(self) -> list[Presence]:
            return [Presence(name, BEGINNING, details) for name, details in self.of_jobs.items()]

    async def main() -> None:
        bus = Unreadable({"llm": {"placement": [{"rank": 0, "node": "n1"}]}})
        watch, clock = made(bus), VirtualClock()
        watching = asyncio.create_task(watch.watch())
        await clock.sleep_until(BEGINNING + timedelta(seconds=1))
        assert reported_on(watch, "n1") == {"llm"}
        bus.is_away = True
        await watch.renew()
        assert reported_on(watch, "n1") == {"llm"}, "an alert is decided by what is known"
        await clock.sleep_until(clock.now() + FORGET_AFTER + 2 * REFRESH_EVERY)
        assert not reported_on(watch, "n1")
        watching.cancel()
        await asyncio.wait([watching])

    virtual_time.run(main())
