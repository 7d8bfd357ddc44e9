"""Playbooks that the end of another playbook's run starts: once for each end, over kills, and in bounded chains."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace

from tests.unit.engine.test_kills_of_people import DoomedStore, revive
from tests.unit.engine.world import World
from trainmedic_server import errors
from trainmedic_server.domain import beginnings
from trainmedic_server.domain.run import Decision, Run, Status
from trainmedic_server.engine import loops
from trainmedic_server.engine.event_dispatch import EventDispatcher
from trainmedic_server.engine.run_ends import RunEnds
from trainmedic_server.ports.ending import end_tasks

MakeWorld = Callable[..., World]

CAP = """
playbook: cap
on: {alert: Hot}
target: {gpu: "{{ labels.gpu }}", node: "{{ labels.node }}"}
steps:
  - {action: test.cap}
"""
AFTER = """
playbook: after
on: {run: {playbook: [cap, other], status: failed}}
target: node
steps:
  - {action: test.other, with: {amount: "{{ ended_run.message | length }}"}, when: ended_run.gpu == labels.gpu}
"""


class Follower:
    """Follows the ends of a world's runs, as a server does next to its engine."""

    def __init__(self, at: World) -> None:
        self._at = at

    async def start(self) -> None:
        ends = RunEnds(self._at.store, self._at.catalog, self._at.engine.admit, self._at.clock)
        sleep = loops.sleeping_by(self._at.clock)
        dispatcher = EventDispatcher(self._at.store, self._at.store, ends, self._at.metrics, sleep=sleep)
        await dispatcher.begin()
        self._task = asyncio.create_task(dispatcher.run())

    async def stop(self) -> None:
        await end_tasks([self._task])


@asynccontextmanager
async def followed(at: World) -> AsyncIterator[Follower]:
    await at.engine.start()
    follower = Follower(at)
    await follower.start()
    yield follower
    await follower.stop()


async def fail(at: World, **labels: str) -> None:
    at.actions["cap"].outcomes.append(errors.PermanentFailure("no power"))
    await at.post(at.alert(gpu="0", node="n1", **labels))
    await at.pass_time(5)


async def test_a_failed_run_starts_the_other_playbook(world: MakeWorld) -> None:
    """With the labels of its alert, and its target."""
    at = world(CAP, AFTER)
    async with followed(at):
        await fail(at, rack="r1")
    failed, after = await at.runs()
    assert (failed.status, after.status, after.alert_name) == (Status.FAILED, Status.SUCCEEDED, "run:cap")
    assert (after.target_key, after.alert_labels["rack"]) == ("node:n1", "r1")
    assert at.actions["other"].calls[0].params.model_dump()["amount"] == len(failed.message)


async def test_an_alert_with_an_annotation_of_the_same_name_is_one_as_any_other(world: MakeWorld) -> None:
    """Its text is anything, and the other alerts of its delivery are admitted too."""
    at = world(CAP)
    await at.engine.start()
    noted = replace(at.alert(gpu="0", node="n1"), annotations={"ended_run": "see the wiki"})
    await at.post(noted, at.alert(gpu="1", node="n1"))
    assert [run.status for run in await at.runs()] == [Status.SUCCEEDED, Status.SUCCEEDED]


async def test_an_end_with_another_status_starts_nothing(world: MakeWorld) -> None:
    """And leaves no record."""
    at = world(CAP, AFTER)
    async with followed(at):
        await at.post(at.alert(gpu="0", node="n1"))
        await at.pass_time(5)
    assert [run.playbook for run in await at.runs()] == ["cap"]
    assert len(await at.store.transact(lambda tx: tx.firing(10))) == 1


async def test_a_group_ends_once(world: MakeWorld) -> None:
    """The ends of its members are its own."""
    group = CAP.replace('{gpu: "{{ labels.gpu }}", node: "{{ labels.node }}"}', "{nodes: {name: 'n[1-3]'}}")
    after = AFTER.replace("status: failed", "status: succeeded").replace("target: node", "target: cluster")
    at = world(
        group,
        after.replace(", when: ended_run.gpu == labels.gpu", ""),
        inventory={"attributes:n[1-3]": "pool=a"},
        breaker_min_nodes=50,
    )
    async with followed(at):
        await at.post(at.alert())
        await at.pass_time(30)
    assert [run.playbook for run in await at.runs()] == ["cap", "after"]
    assert at.calls() == {"cap": 3, "other": 1}


async def test_a_chain_of_runs_ends_and_says_why(world: MakeWorld) -> None:
    """A cycle that no check saw, as after a reload, stops itself."""
    at = world(
        CAP.replace("on: {alert: Hot}", "on: {run: {playbook: second, status: succeeded}}"),
        AFTER.replace("after", "second").replace("[cap, other], status: failed", "[cap, first], status: succeeded"),
        CAP.replace("playbook: cap", "playbook: first"),
    )
    async with followed(at):
        await at.post(at.alert(gpu="0", node="n1"))
        await at.pass_time(60)
    runs = await at.runs()
    assert [run.playbook for run in runs] == ["first", "second", "cap", "second", "cap", "second"]
    assert (runs[-1].decision, runs[-1].message) == (
        Decision.RATE_LIMITED,
        "a chain has at most 5 runs, each started by the end of the one before it",
    )
    assert len(runs) == beginnings.MOST_CHAINED + 1


async def night(fatal: int, *, before: bool) -> tuple[list[Run], int]:
    store = DoomedStore()
    at = World(CAP, AFTER, store=store)
    async with followed(at) as follower:
        store.left, store.before = fatal, before
        at.actions["cap"].outcomes.extend([errors.PermanentFailure("no power")] * 2)
        alert = at.alert(gpu="0", node="n1")
        asked = asyncio.ensure_future(_delivered(at, alert))
        for _ in range(4):
            await at.pass_time(30)
            if store.died.is_set():
                await follower.stop()
                await revive(at, store)
                await follower.start()
        await asked
        runs, commits = await at.runs(), -store.left
        await at.engine.stop()
    await store.close()
    return runs, commits


async def _delivered(at: World, alert: Any) -> None:
    """Deliver as Alertmanager does: again until it is answered."""
    while True:
        try:
            await asyncio.wait_for(at.post(alert), 20)
            return
        except TimeoutError:
            continue


async def test_an_end_starts_one_run_at_any_kill() -> None:
    """The server dies before or after each commit."""
    whole, commits = await night(0, before=False)
    assert [run.playbook for run in whole] == ["cap", "after"]
    for fatal, before in itertools.product(range(1, commits + 1), (True, False)):
        killed, _ = await night(fatal, before=before)
        assert [(run.playbook, run.status) for run in killed] == [
            ("cap", Status.FAILED),
            ("after", Status.SUCCEEDED),
        ], (fatal, before)
