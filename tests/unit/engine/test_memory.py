"""What a run knows of earlier ones: ``runs`` in conditions and templates."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.unit.engine.world import World
from trainmedic_server import errors
from trainmedic_server.domain.run import Run, Status, StepStatus

MakeWorld = Callable[..., World]
HOUR = 3600

PAGE = """
playbook: page
on: {alert: Hot}
target: {node: "{{ labels.node }}"}
steps:
  - {id: page, when: 'runs.count("1d") >= 3 or runs.last.status == "failed"', action: test.tell}
  - {id: pause, wait: 10m}
  - {id: cap, action: test.cap, with: {amount: '{{ runs.count("1d") }}'}}
  - {id: late, when: 'runs.count("7d") == 3 and now - (runs.last.at or 0) > 0', action: test.look}
"""


async def passed(at: World, node: str = "n1", after: float = HOUR) -> Run:
    """Let an alert of the node come and go, and return its run."""
    alert = at.alert(node=node)
    await at.post(alert)
    await at.pass_time(after)
    await at.resolve(alert)
    return (await at.runs())[-1]


def pages(run: Run) -> bool:
    return run.step(("steps", 0)).status is StepStatus.SUCCEEDED


async def test_runs_that_acted_count_within_the_window(world: MakeWorld) -> None:
    """Those of the playbook on the same target, without the run itself."""
    at = world(PAGE)
    await at.engine.start()
    assert [pages(await passed(at)) for _ in range(5)] == [False, False, False, True, True]
    assert not pages(await passed(at, "n2"))
    await at.pass_time(30 * HOUR)
    again = await passed(at)
    assert not pages(again)
    assert [call.params.amount for call in at.actions["cap"].calls] == [0, 1, 2, 3, 4, 0, 0]  # type: ignore[attr-defined]


async def test_no_last_run_is_false(world: MakeWorld) -> None:
    """A condition may ask for the run as well as for a member of it."""
    book = PAGE.replace(
        """'runs.count("1d") >= 3 or runs.last.status == "failed"'""", "runs.last and not runs.last is none"
    )
    at = world(book)
    await at.engine.start()
    assert [pages(await passed(at)) for _ in range(2)] == [False, True]


async def test_runs_that_changed_nothing_do_not_count(world: MakeWorld) -> None:
    """As those that were refused, observed, or resolved before they acted."""
    at = world(PAGE.replace("target:", "guards: {cooldown: 2h}\ntarget:"))
    await at.engine.start()
    await passed(at)
    refused = await passed(at, after=60)
    assert refused.status is Status.NOT_STARTED
    await at.pass_time(3 * HOUR)
    early = await passed(at, after=60)
    assert early.acted_at is None
    await at.pass_time(3 * HOUR)
    run = await passed(at)
    assert run.memory is not None
    assert run.memory.counts == {"1d": 1, "7d": 1}


async def test_the_server_explains_with_the_runs_on_record(world: MakeWorld) -> None:
    at = world(PAGE)
    await at.engine.start()
    for verdict in ("skipped", "skipped", "skipped", "runs"):
        [of_alert] = await at.engine.explain([at.alert(node="n1")])
        assert of_alert.playbooks[0].steps[0].verdict == verdict
        await passed(at)


async def test_a_group_explains_members_without_their_earlier_runs(world: MakeWorld) -> None:
    text = PAGE.replace('{node: "{{ labels.node }}"}', "{nodes: {rack: r1}}")
    at = world(text, inventory={"attributes:n[1-3]": "rack=r1"})
    await at.engine.start()
    [of_alert] = await at.engine.explain([at.alert("Hot")])
    assert [step.verdict for step in of_alert.playbooks[0].steps] == ["undetermined", "runs", *["undetermined"] * 2]


async def test_the_last_run_is_known_by_its_end(world: MakeWorld) -> None:
    at = world(PAGE)
    await at.engine.start()
    at.actions["cap"].outcomes.append(errors.PermanentFailure("no agent"))
    failed = await passed(at)
    run = await passed(at)
    assert pages(run)
    assert run.memory is not None
    assert run.memory.last is not None
    last = run.memory.last
    assert (last.id, last.status, last.message) == (failed.id, "failed", "step cap: no agent")
    assert (last.at, last.ended_at) == (failed.acted_at, failed.ended_at)
    assert not pages(await passed(at))


@pytest.mark.parametrize("after", [0, 4 * 24 * HOUR])
async def test_a_restart_plans_with_what_was_known_at_the_beginning(world: MakeWorld, after: float) -> None:
    """Although the window has passed over the earlier runs in the meantime."""
    at = world(PAGE, max_age=timedelta(days=9))
    await at.engine.start()
    for _ in range(3):
        await passed(at)
    await at.post(at.alert(node="n1"))
    await at.restart(after)
    await at.pass_time(HOUR)
    run = (await at.runs())[-1]
    assert run.status is Status.SUCCEEDED
    assert [step.status for step in run.steps] == [StepStatus.SUCCEEDED] * 4
    assert at.actions["cap"].calls[-1].params.amount == 3  # type: ignore[attr-defined]


async def test_members_of_a_group_remember_their_own_runs(world: MakeWorld) -> None:
    text = PAGE.replace('{node: "{{ labels.node }}"}', "{nodes: {rack: r1}}\nrollout: {serial: 100%}")
    at = world(text, inventory={"attributes:n[1-2]": "rack=r1"}, breaker_min_nodes=9)
    await at.engine.start()
    for _ in range(2):
        await passed(at)
    assert [call.params.amount for call in at.actions["cap"].calls] == [0, 0, 1, 1]  # type: ignore[attr-defined]


async def test_a_playbook_without_runs_reads_and_keeps_nothing(world: MakeWorld) -> None:
    at = world("playbook: p\non: {alert: Hot}\ntarget: {node: n1}\nsteps: [{action: test.cap}]")
    await at.engine.start()
    assert (await passed(at)).memory is None
