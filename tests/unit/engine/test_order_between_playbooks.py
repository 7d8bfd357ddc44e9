"""Several playbooks that answer one alert: their order, and one that acts alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.engine.world import World
from trainmedic_server.domain.run import Decision, Status

MakeWorld = Callable[..., World]


def book(name: str, more: str = "", target: str = "node", action: str = "test.cap") -> str:
    return f"playbook: {name}\non: {{alert: Hot}}\ntarget: {target}\n{more}\nsteps:\n  - {{action: {action}}}\n"


async def names(world: World) -> list[str]:
    await world.pass_time(1)
    return [run.playbook for run in await world.runs()]


async def reactions(world: World) -> dict[str, str]:
    (record,) = await world.store.transact(lambda tx: tx.firing(10))
    return {reaction.playbook: str(reaction.decision) for reaction in record.reactions}


async def test_a_higher_priority_comes_first(world: MakeWorld) -> None:
    """Those without one keep the order of their names; the second waits for the target."""
    at = world(book("a"), book("b", "priority: 5"), book("c", "priority: -1"))
    await at.engine.start()
    await at.post(at.alert("Hot", node="n1"))
    assert await names(at) == ["b", "a", "c"]
    assert {run.status for run in await at.runs()} == {Status.SUCCEEDED}


async def test_an_exclusive_playbook_acts_alone(world: MakeWorld) -> None:
    """Others on its target are recorded as excluded, whatever their priority; those on another target go on."""
    at = world(
        book("a", "priority: 9"),
        book("b", "exclusive: true"),
        book("c", target="cluster", action="test.tell"),
        book("d", "exclusive: true\npriority: -1"),
    )
    await at.engine.start()
    await at.post(at.alert("Hot", node="n1"))
    assert sorted(await names(at)) == ["b", "c"]
    found = await reactions(at)
    assert (found["a"], found["d"], found["b"]) == ("excluded", "excluded", "started")


async def test_an_exclusive_playbook_in_cooldown_still_excludes(world: MakeWorld) -> None:
    """Its guard says that enough was done."""
    at = world(book("a"), book("b", "exclusive: true\nguards: {cooldown: 1h}"))
    await at.engine.start()
    await at.post(at.alert("Hot", node="n1"))
    await at.pass_time(1)
    await at.post(at.alert("Hot", node="n1", instance="again"))
    await at.pass_time(1)
    assert [(run.playbook, run.decision) for run in await at.runs()] == [
        ("b", Decision.STARTED),
        ("b", Decision.COOLDOWN),
    ]


@pytest.mark.parametrize("more", ["exclusive: true\nmode: observe", "priority: 3"])
async def test_one_on_trial_excludes_nobody(world: MakeWorld, more: str) -> None:
    """A playbook that only observes must not switch off those that act."""
    at = world(book("a"), book("b", more))
    await at.engine.start()
    await at.post(at.alert("Hot", node="n1"))
    assert sorted(await names(at)) == ["a", "b"]


async def test_an_unknown_target_excludes_nobody(world: MakeWorld) -> None:
    """Each says that it does not know the target."""
    at = world(book("a"), book("b", "exclusive: true"))
    await at.engine.start()
    await at.post(at.alert("Hot"))
    await at.pass_time(1)
    assert {run.decision for run in await at.runs()} == {Decision.TARGET_UNKNOWN}
    assert len(await at.runs()) == 2
