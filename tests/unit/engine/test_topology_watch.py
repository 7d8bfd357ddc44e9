"""Where jobs run, as kept from presences: what is known, for how long, and what nonsense does to it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

from trainmedic_server import telemetry
from trainmedic_server.domain.topology import Pod
from trainmedic_server.engine.topology_watch import FORGET_AFTER, REFRESH_EVERY, TopologyWatch
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
    asked: int = 0

    async def jobs(self) -> list[Presence]:
        self.asked += 1
        if self.is_away:
            raise BusUnavailable("away")
        return [Presence(name, BEGINNING, details) for name, details in self.of_jobs.items()]

    async def agents(self) -> list[Presence]:
        return [Presence(name, BEGINNING, details) for name, details in self.of_agents.items()]


class Cluster:
    """Two jobs' pods."""

    def __init__(self) -> None:
        self.known = {uid: Pod(uid, "ml", f"{job}-0", "n1", job) for uid, job in (("u1", "llm-1"), ("u2", "llm-2"))}
        self.known["u3"] = Pod("u3", "monitoring", "dcgm", "n1", None)

    def pod(self, uid: str) -> Pod | None:
        return self.known.get(uid)

    def pods(self) -> list[Pod]:
        return list(self.known.values())

    def pods_of(self, job: str) -> list[Pod]:
        return [pod for pod in self.known.values() if pod.job == job]


def made(bus: Presences, wanted: bool = True) -> TopologyWatch:
    clock = VirtualClock()
    return TopologyWatch(
        cast(CommandBus, bus),
        clock,
        telemetry.Metrics(),
        lambda: wanted,
        {"10.0.0.7": "n7"},
        lambda: {"10.0.0.7": "wrong", "node:n1": ("llm-1", "llm-2")},
        Cluster(),
    )


def gpu(uuid: str, index: int, *pods: Any) -> dict[str, Any]:
    return {"index": index, "uuid": uuid, "pci_bus_id": f"0000:1{index}:00.0", "pods": list(pods)}


async def test_the_jobs_on_a_gpu_are_known_by_each_of_its_names() -> None:
    """From what the job says, and from the pods that the agent sees; those of no job count for nothing."""
    bus = Presences({"llm": {"placement": [{"rank": 0, "node": "n1", "gpu": A.upper()}]}})
    bus.of_agents["n1"] = {"gpus": [gpu(A, 0, "u1", "u3"), gpu(B, 1, "u1", "u2", "gone")]}
    whereabouts = made(bus)
    await whereabouts.refresh()
    known = whereabouts.known()
    for name in (A.lower().removeprefix("gpu-"), "n1/0", "n1/0000:10:00.0"):
        assert known[f"told:gpu:{name}"] == "llm"
        assert known[f"gpu:{name}"] == "llm-1"
    assert known["gpu:n1/1"] == ("llm-1", "llm-2")
    assert "told:gpu:n1/1" not in known
    assert known["told:node:n1"] == "llm"
    assert (known["10.0.0.7"], known["node:n1"]) == ("n7", ("llm-1", "llm-2"))
    assert len(known) == len(set(known))


async def test_a_gpu_that_two_jobs_name_has_both() -> None:
    """Which one is meant is not for this to say."""
    placed = {"placement": [{"rank": 0, "node": "n1", "gpu": A}]}
    whereabouts = made(Presences({"one": placed, "two": placed}))
    await whereabouts.refresh()
    assert whereabouts.known()[f"told:gpu:{A.lower().removeprefix('gpu-')}"] == ("one", "two")


async def test_nonsense_in_a_presence_is_passed_over() -> None:
    """Whoever can write to Redis writes it; the rest is known all the same."""
    bus = Presences({"bad": {"placement": [{"node": 7}, "?", None, {"node": "n1", "gpu": ["x"]}]}})
    bus.of_jobs |= {"worse": {"placement": {"rank": 0}}, "good": {"placement": [{"rank": 0, "node": "n2", "gpu": B}]}}
    entries = [1, {"uuid": 3}, {"uuid": B, "index": "x", "pods": 9}, {"uuid": A, "index": True, "pods": ["u1", 4]}]
    bus.of_agents = {"n2": {"gpus": entries}, "n3": {"gpus": "none"}, "n4": {}}
    whereabouts = made(bus)
    await whereabouts.refresh()
    known = whereabouts.known()
    assert known["told:node:n1"] == "bad"
    assert known[f"told:gpu:{B.lower().removeprefix('gpu-')}"] == "good"
    assert known[f"gpu:{A.lower().removeprefix('gpu-')}"] == "llm-1"


async def test_what_changes_is_known_with_the_next_look() -> None:
    """A job that has moved, a process that has ended."""
    bus = Presences({"llm": {"placement": [{"rank": 0, "node": "n1"}]}}, {"n1": {"gpus": [gpu(A, 0, "u1")]}})
    whereabouts = made(bus)
    await whereabouts.refresh()
    before = whereabouts.known()
    assert (before["told:node:n1"], before["gpu:n1/0"]) == ("llm", "llm-1")
    bus.of_jobs["llm"] = {"placement": [{"rank": 0, "node": "n2"}]}
    bus.of_agents["n1"] = {"gpus": [gpu(A, 0)]}
    await whereabouts.refresh()
    after = whereabouts.known()
    assert after["told:node:n2"] == "llm"
    assert "told:node:n1" not in after
    assert "gpu:n1/0" not in after


async def test_nothing_is_read_while_no_playbook_asks() -> None:
    """An idle server leaves Redis alone."""
    bus = Presences({"llm": {"placement": [{"rank": 0, "node": "n1"}]}})
    whereabouts = made(bus, wanted=False)
    await whereabouts.refresh()
    assert bus.asked == 0
    assert "told:node:n1" not in whereabouts.known()


def test_what_cannot_be_read_anew_is_forgotten_after_a_while() -> None:
    """A short absence of Redis changes nothing; after a long one a target is refused, not guessed."""

    async def main() -> None:
        bus = Presences({"llm": {"placement": [{"rank": 0, "node": "n1"}]}})
        whereabouts, clock = made(bus), VirtualClock()
        watching = asyncio.create_task(whereabouts.watch())
        await clock.sleep_until(BEGINNING + timedelta(seconds=1))
        assert "told:node:n1" in whereabouts.known()
        bus.is_away = True
        await clock.sleep_until(clock.now() + FORGET_AFTER - 2 * REFRESH_EVERY)
        assert "told:node:n1" in whereabouts.known()
        await clock.sleep_until(clock.now() + 4 * REFRESH_EVERY)
        assert "told:node:n1" not in whereabouts.known()
        bus.is_away = False
        await clock.sleep_until(clock.now() + 2 * REFRESH_EVERY)
        assert "told:node:n1" in whereabouts.known()
        watching.cancel()
        await asyncio.wait([watching])

    virtual_time.run(main())
