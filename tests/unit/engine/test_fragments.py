"""Runs with steps of a fragment, also over a restart with another version of it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.unit.engine.books import catalog_of
from tests.unit.engine.world import Amount, World
from trainmedic_server import errors
from trainmedic_server.catalog import loader
from trainmedic_server.domain.run import Decision, Status, StepStatus

MakeWorld = Callable[..., World]

TEXT = """
playbook: ladder
on: {alert: Hot}
target: {node: "{{ labels.node }}"}
steps:
  - {id: back, use: repair, with: {amount: "{{ labels.amount }}"}}
  - {id: more, when: 'steps["back.second"].status == "succeeded"', action: test.look}
---
fragment: repair
inputs: {amount: {type: number}}
steps:
  - {id: first, action: test.cap, with: {amount: "{{ inputs.amount }}"}, undo: on_failure, on_error: continue}
  - {id: pause, wait: 10m}
  - id: second
    when: steps.first.status == "failed"
    action: test.other
    with: {amount: "{{ inputs.amount + 1 }}"}
"""


def ladder(world: MakeWorld, text: str = TEXT) -> World:
    at = world()
    (playbook,), problems = loader.load(text, "test.yaml", at.actions)
    assert not problems
    at.catalog = catalog_of([playbook.text], at.actions)
    at.engine = at._engine()
    return at


async def test_a_run_keeps_its_fragment_over_a_restart_with_another(world: MakeWorld) -> None:
    """The second step is that of the version with which the run began."""
    at = ladder(world)
    await at.engine.start()
    at.actions["cap"].outcomes.append(errors.PermanentFailure("no"))
    await at.post(at.alert(node="n1", amount="7"))
    assert (await at.run()).step(("steps", 1)).status is StepStatus.WAITING
    at.catalog = ladder(world, TEXT.replace("test.other", "test.look").replace("10m", "1m")).catalog
    await at.restart(60)
    await at.pass_time(5 * 60)
    assert at.calls() == {"cap": 1}
    await at.pass_time(5 * 60)
    run = await at.run()
    assert run.status is Status.SUCCEEDED
    assert [step.id for step in run.steps] == ["back.first", "back.pause", "back.second", "more"]
    assert at.actions["other"].calls[0].params == Amount(amount=8)
    assert at.calls() == {"cap": 1, "other": 1, "look": 1}


@pytest.mark.parametrize("after", [0.0, 700.0])
async def test_a_kill_within_a_fragment_repeats_nothing(world: MakeWorld, after: float) -> None:
    """The undo of its step is that of any other."""
    at = ladder(world, TEXT.replace('second\n    when: steps.first.status == "failed"', "second"))
    await at.engine.start()
    at.actions["other"].outcomes += [timedelta(hours=1), errors.PermanentFailure("no")]
    await at.post(at.alert(node="n1", amount="7"))
    await at.restart(after)
    await at.pass_time(2000)
    assert (await at.run()).status is Status.FAILED
    assert at.calls()["cap"] == 1
    assert at.calls()["uncap"] == 1


async def test_an_input_that_is_no_number_fails_the_step(world: MakeWorld) -> None:
    at = ladder(world, TEXT.replace(", on_error: continue", ""))
    await at.engine.start()
    await at.post(at.alert(node="n1", amount="much"))
    run = await at.run()
    assert run.status is Status.FAILED
    assert "use of fragment 'repair': amount: 'much' is not a number" in run.message
    assert at.calls() == {}


async def test_a_refused_run_carries_out_its_fragment_once(world: MakeWorld) -> None:
    """Over a kill too."""
    guards = "guards:\n  max_runs: {count: 1, per: 1h}\n  on_limited: [{use: told}]\nsteps:"
    told = "---\nfragment: told\nsteps:\n  - {action: test.tell, retry: {attempts: 2, delay: 1m}}\n"
    at = ladder(world, TEXT.replace("steps:", guards, 1) + told)
    await at.engine.start()
    await at.post(at.alert(node="n1", amount="7"))
    at.actions["tell"].outcomes.append(errors.TemporaryFailure("no answer"))
    await at.post(at.alert(node="n2", amount="7"))
    await at.restart(1)
    await at.pass_time(3000)
    refused = (await at.runs())[-1]
    assert (refused.decision, [step.id for step in refused.steps]) == (Decision.RATE_LIMITED, ["told.step-1"])
    assert at.calls()["tell"] == 2
