"""The guard ``min_available`` in the engine: storms, repeats, groups and restarts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.unit.engine.world import World
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.domain.run import Decision, Status
from trainmedic_server.domain.topology import ClusterNode, SlurmTopology, names_of
from trainmedic_server.domain.upcoming import clock

MakeWorld = Callable[..., World]
DRAIN = """
playbook: drain
on: {alert: Broken}
target: node
guards: {min_available: 75%}
steps:
  - {id: cap, action: test.cap, timeout: 1h}
"""
OTHER = DRAIN.replace("playbook: drain", "playbook: other").replace("Broken", "Worn")
HARMLESS = """
playbook: look
on: {alert: Hot}
target: node
steps:
  - {id: look, action: test.look}
"""
GROUP = """
playbook: swap
on: {alert: Old}
target: {nodes: {partition: gpu}}
rollout: {serial: 100%}
guards: {min_available: 75%}
steps:
  - {id: cap, action: test.cap, timeout: 1h}
"""


def fleet(*drained: str) -> SlurmTopology:
    """Eight nodes, of which 75 % are six."""
    nodes = tuple(
        ClusterNode(name, (), {"partition": "gpu"}, "DRAIN" if name in drained else "", ("gpu",))
        for name in (f"n{number}" for number in range(1, 9))
    )
    return SlurmTopology(nodes, names=names_of(nodes))


async def decision_on(at: World, node: str, name: str = "Broken") -> Decision:
    return (await at.post(at.alert(name, node=node))).runs[0].decision


@pytest.mark.parametrize("mode", [Mode.ENFORCE, Mode.APPROVE, Mode.OBSERVE])
async def test_nodes_that_others_drained_count_and_a_repeat_starts_it(world: MakeWorld, mode: Mode) -> None:
    """Nothing is recorded twice while it is refused; the run starts once a node is back."""
    at = world(DRAIN, slurm=fleet("n7", "n8"), mode=mode)
    await at.engine.start()
    broken = at.alert("Broken", node="n1")
    first = (await at.post(broken)).runs[0]
    assert first.decision is Decision.CAPACITY_LIMITED
    assert "5 of 8 nodes of partition gpu" in (first.why or "")
    assert (await at.post(broken)).runs[0].decision is Decision.CAPACITY_LIMITED
    assert len(await at.runs()) == 1
    assert (await decision_on(at, "n8")) is not Decision.CAPACITY_LIMITED  # it is out of service already
    at.slurm = fleet("n8")
    await at.pass_time(60)
    expected = Decision.OBSERVE_ONLY if mode is Mode.OBSERVE else Decision.STARTED
    assert (await at.post(broken)).runs[0].decision is expected


async def test_a_storm_takes_no_more_than_is_allowed(world: MakeWorld) -> None:
    """In one delivery, in the next ones, of two playbooks, and after a restart: open runs count before Slurm shows
    what they did.
    """
    at = world(DRAIN, OTHER, slurm=fleet())
    await at.engine.start()
    at.actions["cap"].outcomes.extend(["hang"] * 10)
    storm = await at.post(*(at.alert("Broken", node=f"n{number}") for number in (1, 2, 3)))
    assert [run.decision for run in storm.runs] == [
        *(Decision.STARTED, Decision.STARTED, Decision.CAPACITY_LIMITED),
    ]
    assert await decision_on(at, "n4", "Worn") is Decision.CAPACITY_LIMITED
    await at.restart(60)
    assert await decision_on(at, "n5") is Decision.CAPACITY_LIMITED


async def test_a_run_that_has_just_ended_counts_until_slurm_shows_it(world: MakeWorld) -> None:
    """Then only what Slurm lists does. Playbooks without the guard never ask."""
    at = world(DRAIN, HARMLESS, slurm=fleet("n8"))
    await at.engine.start()
    assert await decision_on(at, "n1") is Decision.STARTED
    await at.pass_time(1)
    assert await decision_on(at, "n2") is Decision.CAPACITY_LIMITED
    assert await decision_on(at, "n2", "Hot") is Decision.STARTED
    await at.pass_time(60)
    assert await decision_on(at, "n3") is Decision.STARTED


async def test_members_of_a_group_wait_for_capacity(world: MakeWorld) -> None:
    """No more than two of eight at once, and all in the end."""
    at = world(GROUP, slurm=fleet())
    await at.engine.start()
    at.actions["cap"].outcomes.extend([timedelta(seconds=100)] * 8)
    await at.post(at.alert("Old"))
    most = 0
    for _ in range(150):
        most = max(most, at.actions["cap"].in_flight)
        await at.pass_time(10)
    parent = await at.run()
    assert (parent.status, parent.message) == (Status.SUCCEEDED, "8 members: 8 succeeded")
    assert most == 2


async def test_nothing_starts_while_slurm_is_silent(world: MakeWorld) -> None:
    """Runs are refused and started by a later report; members of a group wait."""
    at = world(DRAIN, GROUP, slurm=fleet())
    await at.engine.start()
    at.actions["cap"].outcomes.extend([timedelta(seconds=100)] * 8)
    await at.post(at.alert("Old"))
    since = at.clock.now()
    at.slurm = fleet().unanswered(since)
    refused = (await at.post(at.alert("Broken", node="n8"))).runs[0]
    unknown = f"min_available: the state of the nodes is not known since {clock(since)}: Slurm does not answer"
    assert (refused.decision, refused.why) == (Decision.CAPACITY_LIMITED, unknown)
    await at.pass_time(600)
    (group,) = [run for run in await at.runs() if run.is_group]
    assert group.message == f"no further member starts: {unknown}"
    assert at.calls() == {"cap": 2}
    at.slurm = fleet()
    await at.pass_time(60)
    await at.pass_time(1200)
    assert (await at.run(group.id)).message == "8 members: 8 succeeded"
    assert (await decision_on(at, "n8")) is Decision.STARTED
