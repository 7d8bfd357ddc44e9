"""Actions that work on the nodes of a job: where they work is on record before they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from pydantic import BaseModel

from tests.unit.engine.world import Amount, Scripted, World
from trainmedic_core.target import Target, TargetKind
from trainmedic_server import errors
from trainmedic_server.domain.run import Status, StepStatus, UndoStatus
from trainmedic_server.ports.actions import Call, Inverse

MakeWorld = Callable[..., World]

SPREAD = """
playbook: spread
on: {alert: Slow}
target: job
steps:
  - {id: all, action: test.spread, with: {amount: 80}, undo: on_resolve, retry: {attempts: 2, delay: 5s}}
"""

ON_ONE = """
playbook: one
on: {alert: Hot}
target: {gpu: "{{ labels.gpu }}", node: "{{ labels.node }}"}
steps:
  - {id: act, action: test.other}
"""


class Somewhere(Amount):
    nodes: list[str] | None = None


class Spread(Scripted):
    """Works on nodes that it looks up; a test sets them, or an error."""

    name = "test.spread"
    Params = Somewhere

    def __init__(self, services: Any = None) -> None:
        super().__init__(services)
        self.nodes: list[str] | Exception = ["n1", "n2"]
        self.asked = 0

    async def locate(self, call: Call) -> BaseModel:
        params = call.params
        assert isinstance(params, Somewhere)
        if params.nodes is not None:
            return params
        self.asked += 1
        if isinstance(self.nodes, Exception):
            raise self.nodes
        return params.model_copy(update={"nodes": self.nodes})

    @classmethod
    def places(cls, params: BaseModel) -> Sequence[Target]:
        assert isinstance(params, Somewhere)
        return [Target(TargetKind.NODE, node=node) for node in params.nodes or ()]

    @classmethod
    def inverse(cls, params: BaseModel, output: Any) -> Inverse | None:
        assert isinstance(params, Somewhere)
        return Inverse("test.gather", params.model_dump(exclude_none=True))


class Gather(Spread):
    name = "test.gather"


def made(world: MakeWorld, *more: str, **settings: Any) -> tuple[World, Spread, Spread]:
    w = world(SPREAD, *more, more=[Spread, Gather], **settings)
    spread, gather = w.actions["spread"], w.actions["gather"]
    assert isinstance(spread, Spread)
    assert isinstance(gather, Spread)
    return w, spread, gather


async def test_where_it_works_is_in_the_history_before_it_does(world: MakeWorld) -> None:
    """In the parameters of the step, in its undo's, and in an event."""
    w, spread, gather = made(world)
    spread.outcomes.append("hang")
    alert = w.alert("Slow", job_name="llm-1")
    await w.post(alert)
    (step,) = (await w.run()).steps
    assert step.params == {"amount": 80, "nodes": ["n1", "n2"]}
    assert step.undo is not None
    assert step.undo.params == {"amount": 80, "nodes": ["n1", "n2"]}
    assert (await w.story()) == ["started", "step_started", "step_located"]
    await w.restart()
    spread.nodes = ["n9"]
    assert spread.calls[-1].params.model_dump()["nodes"] == ["n1", "n2"]
    await w.resolve(alert)
    assert gather.calls[-1].params.model_dump()["nodes"] == ["n1", "n2"]
    assert spread.asked == 1


async def test_where_it_works_cannot_be_found_out(world: MakeWorld) -> None:
    """Then nothing was sent: a temporary failure is tried again, and there is nothing to take back."""
    w, spread, gather = made(world)
    spread.nodes = errors.TemporaryFailure("no job of that name is connected")
    alert = w.alert("Slow", job_name="llm-1")
    await w.post(alert)
    await w.pass_time(60)
    run = await w.run()
    assert (spread.asked, spread.calls) == (2, [])
    assert run.status is Status.FAILED
    assert run.message == "step all: no job of that name is connected"
    assert run.steps[0].undo.status is UndoStatus.DROPPED  # type: ignore[union-attr]
    await w.resolve(alert)
    assert gather.calls == []


async def test_a_retry_works_in_the_same_places(world: MakeWorld) -> None:
    """What may have been begun there is ended there."""
    w, spread, _ = made(world)
    spread.outcomes.append(errors.OutcomeUnknown("one is silent"))
    await w.post(w.alert("Slow", job_name="llm-1"))
    spread.nodes = ["n9"]
    await w.pass_time(60)
    first, second = spread.calls
    assert first.command_id == second.command_id
    assert second.params.model_dump()["nodes"] == ["n1", "n2"]
    assert (await w.run()).steps[0].status is StepStatus.SUCCEEDED


async def test_attempts_on_a_job_and_on_one_of_its_nodes_come_one_after_the_other(world: MakeWorld) -> None:
    """On nodes where the job is not, nobody waits; and neither run keeps the other from its target."""
    w, spread, _ = made(world, ON_ONE)
    spread.outcomes.append(timedelta(seconds=10))
    await w.post(w.alert("Slow", job_name="llm-1"))
    for node in ("n1", "n3"):
        await w.post(w.alert("Hot", node=node, gpu="0"))
    assert [call.target.node for call in w.actions["other"].calls] == ["n3"]
    await w.pass_time(11)
    assert [call.target.node for call in w.actions["other"].calls] == ["n3", "n1"]


async def test_an_undo_on_a_job_waits_for_attempts_on_its_nodes(world: MakeWorld) -> None:
    """It is no different from the act."""
    w, _, gather = made(world, ON_ONE)
    alert = w.alert("Slow", job_name="llm-1")
    await w.post(alert)
    w.actions["other"].outcomes.append(timedelta(seconds=10))
    await w.post(w.alert("Hot", node="n2", gpu="0"))
    await w.resolve(alert)
    assert gather.calls == []
    await w.pass_time(11)
    assert len(gather.calls) == 1


async def test_a_kill_before_it_is_known_where_to_work_changes_nothing(world: MakeWorld) -> None:
    """The next server finds it out."""
    w, spread, _ = made(world)
    record = w.engine._recorder.record  # the commit of where it works never comes

    async def killed(run: Any, before: Any, events: Any, alerts: Any = None) -> bool:
        if any(event.kind == "step_located" for event in events):
            raise RuntimeError("killed")
        return await record(run, before, events, alerts)

    w.engine._recorder.record = killed  # type: ignore[method-assign]
    await w.post(w.alert("Slow", job_name="llm-1"))
    assert spread.calls == []
    await w.restart()
    assert [call.params.model_dump()["nodes"] for call in spread.calls] == [["n1", "n2"]]
    assert (await w.run()).steps[0].status is StepStatus.SUCCEEDED
