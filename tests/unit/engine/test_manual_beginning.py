"""Playbooks that people start, with typed inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.engine.world import World
from trainmedic_core.target import Target, TargetKind
from trainmedic_server import errors
from trainmedic_server.domain.run import Decision, OrderKind
from trainmedic_server.engine.admission_changes import ByHand
from trainmedic_server.engine.manual_runs import Started, StartOrder
from trainmedic_server.ports.store import HistoryFilter

MakeWorld = Callable[..., World]
BOOK = """
playbook: by-people
on:
  manual:
    by: ["group:hardware", "user:ann"]
    inputs:
      node: {type: text, required: true}
      watts: {type: number, default: 250}
      until: {type: duration, default: 90m}
target: {node: "{{ inputs.node }}"}
steps:
  - {action: test.cap, with: {amount: "{{ inputs.watts }}"}}
"""
ON_NODE = BOOK.replace('target: {node: "{{ inputs.node }}"}', "target: node")


async def start(w: World, given: dict[str, Any], by: ByHand = ByHand("ann"), target: Target | None = None) -> Started:
    started = await w.engine.start_run(StartOrder("by-people", target, inputs=given), by)
    await w.pass_time(0)
    return started


async def test_inputs_name_the_target_and_reach_the_steps(world: MakeWorld) -> None:
    """Text from a command line becomes a number; a default counts where nothing is given."""
    w = world(BOOK)
    run = (await start(w, {"node": "n1", "watts": "300"})).run
    assert (run.target, run.decision, run.started_by) == (
        Target(TargetKind.NODE, node="n1"),
        Decision.STARTED,
        "ann",
    )
    await start(w, {"node": "n2"})
    assert [call.params.model_dump()["amount"] for call in w.actions["cap"].calls] == [300, 250]


async def test_wrong_inputs_are_reported_one_by_one_and_start_nothing(world: MakeWorld) -> None:
    """Missing, unknown and of another type."""
    w = world(BOOK)
    with pytest.raises(errors.PayloadError) as wrong:
        await start(w, {"watts": "many", "untl": "1h"})
    assert dict(wrong.value.problems) == {
        "inputs.node": "is required; give a text",
        "inputs.untl": "the playbook has no such input; did you mean 'until'?",
        "inputs.watts": "'many' is not a number, or too large",
    }
    assert w.calls() == {}


async def test_only_those_whom_by_names_start_it(world: MakeWorld) -> None:
    """By name or by group."""
    w = world(BOOK)
    with pytest.raises(errors.NotEntitled, match="group:hardware or user:ann"):
        await start(w, {"node": "n1"}, ByHand("bob"))
    run = (await start(w, {"node": "n1"}, ByHand("bob", groups=frozenset({"hardware"})))).run
    assert run.started_by == "bob"


async def test_no_alert_starts_it(world: MakeWorld) -> None:
    """Not even one with the name of a manual start."""
    w = world(BOOK)
    admitted = await w.post(w.alert("StartedByHand", node="n1"))
    assert (admitted.runs, admitted.unmatched) == ((), 1)


async def test_a_target_that_the_playbook_does_not_derive_must_be_given(world: MakeWorld) -> None:
    """And is used as given."""
    w = world(ON_NODE)
    with pytest.raises(errors.PayloadError) as wrong:
        await start(w, {"node": "n1"})
    assert wrong.value.problems == (("target", "is missing; by-people works on a node"),)
    target = Target(TargetKind.NODE, node="n3")
    assert (await start(w, {"node": "n1"}, target=target)).run.target == target


async def test_a_repeated_key_starts_nothing_and_with_other_inputs_is_refused(world: MakeWorld) -> None:
    """A key stands for one request."""
    w = world(BOOK)
    first = await start(w, {"node": "n1", "watts": 300}, ByHand("ann", key="k"))
    again = await start(w, {"node": "n1", "watts": "300"}, ByHand("ann", key="k"))
    assert (again.run.id, again.is_repeated) == (first.run.id, True)
    with pytest.raises(errors.Conflict, match="'k' was used for another request"):
        await start(w, {"node": "n1", "watts": 200}, ByHand("ann", key="k"))
    assert w.calls() == {"cap": 1}


async def test_a_run_keeps_its_inputs_over_a_restart(world: MakeWorld) -> None:
    """Steps after it see the same values."""
    asked = BOOK.replace("steps:", "steps:\n  - {id: sure, approve: Go?}")
    w = world(asked)
    run = (await start(w, {"node": "n1", "watts": 300})).run
    await w.restart()
    await w.engine.order(run.id, OrderKind.APPROVE, "ann")
    await w.pass_time(0)
    assert [call.params.model_dump()["amount"] for call in w.actions["cap"].calls] == [300]


async def test_other_playbooks_take_no_inputs(world: MakeWorld) -> None:
    """An input that nothing reads would be lost silently."""
    w = world("playbook: by-people\non: {alert: Hot}\ntarget: node\nsteps:\n  - {action: test.other}\n")
    with pytest.raises(errors.PayloadError, match="takes no inputs"):
        await start(w, {"a": "b"}, target=Target(TargetKind.NODE, node="n1"))


async def test_nodes_given_by_hand_are_a_group(world: MakeWorld) -> None:
    """A list as an input selects the members. A dry run shows the first one's steps."""
    w = world(
        """
playbook: by-people
on: {manual: {by: ["user:ann"], inputs: {nodes: {type: nodes, required: true}}}}
target: {nodes: {name: "{{ inputs.nodes }}"}}
rollout: {serial: 100%}
steps:
  - {action: test.cap, with: {amount: "{{ target.node | replace('n', '') }}"}}
""",
        inventory={"gpus:n[1-4]": "8"},
        breaker_min_nodes=50,
    )
    await w.engine.start()
    tried = await w.engine.start_run(
        StartOrder("by-people", None, dry_run=True, inputs={"nodes": "n3,n1"}), ByHand("ann")
    )
    (step,) = tried.steps
    assert (step.params, step.targets) == ({"amount": 1.0}, ("node:n1", "node:n3"))
    assert str(step.note).endswith("shown for node:n1")
    started = await start(w, {"nodes": "n1,n3"})
    await w.pass_time(1)
    page, _ = await w.store.page(HistoryFilter(parent=started.run.id), 10, None)
    assert sorted(run.target_key for run in page) == ["node:n1", "node:n3"]
