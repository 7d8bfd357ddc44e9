"""A step states how it is undone, where its action has no undo of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel

from tests.unit.engine.world import Scripted, World
from trainmedic_server import errors
from trainmedic_server.api import views
from trainmedic_server.domain import changes
from trainmedic_server.domain.run import OrderKind, Run, Status, Undo, UndoStatus
from trainmedic_server.domain.value_types import NUMBER, TEXT, Shape

MakeWorld = Callable[..., World]


class Hook(Scripted):
    name = "test.hook"
    outputs: ClassVar[Mapping[str, Shape]] = {"id": TEXT, "size": NUMBER}

    @classmethod
    def inverse(cls, params: BaseModel, output: Mapping[str, Any] | None) -> None:
        return None


def book(undo: str, more: str = "") -> str:
    return f"""
playbook: hook
on: {{alert: Hot}}
target: node
vars: {{amount: 7}}
steps:
  - {{id: call, action: test.hook, with: {{amount: 5}}, undo: {undo}}}
{more}
"""


PLAIN = '{when: on_resolve, action: test.other, with: {amount: "{{ vars.amount + 1 }}"}}'
BY_OUTPUT = '{action: test.other, with: {amount: "{{ output.size }}"}}'


def undo_of(run: Run) -> Undo:
    undo = run.steps[0].undo
    assert undo is not None
    return undo


async def test_the_stated_action_is_the_undo(world: MakeWorld) -> None:
    """Known before the attempt, so that a restart in the middle finds it."""
    at = world(book(PLAIN), more=[Hook])
    await at.engine.start()
    at.actions["hook"].outcomes.append("hang")
    alert = at.alert("Hot", node="n1")
    await at.post(alert)
    await at.pass_time(1)
    undo = undo_of(await at.run())
    assert (undo.action, undo.params, undo.status) == ("test.other", {"amount": 8}, UndoStatus.ARMED)
    await at.restart(after=2)
    await at.pass_time(1)
    await at.resolve(alert)
    await at.pass_time(1)
    assert undo_of(await at.run()).status is UndoStatus.DONE
    (call,) = at.actions["other"].calls
    assert (call.params.model_dump()["amount"], call.undo_of) == (8, undo.undo_of)


async def test_an_undo_may_use_what_the_action_answered(world: MakeWorld) -> None:
    """It is known after the attempt; without an answer there is none."""
    at = world(book(BY_OUTPUT), more=[Hook])
    await at.engine.start()
    at.actions["hook"].outcomes.extend([{"id": "a", "size": 42}, errors.OutcomeUnknown("lost")])
    alert = at.alert("Hot", node="n1")
    await at.post(alert)
    await at.pass_time(1)
    assert undo_of(await at.run()).params == {"amount": 42}
    await at.resolve(alert)
    await at.pass_time(1)
    assert at.calls() == {"hook": 1, "other": 1}
    await at.post(at.alert("Hot", node="n2"))
    await at.pass_time(1)
    assert (await at.runs())[-1].steps[0].undo is None


async def test_an_undo_that_cannot_be_known_is_told(world: MakeWorld) -> None:
    """The answer lacks what the undo needs: it is dropped with the reason, and the change is listed as lasting."""
    at = world(book(BY_OUTPUT), more=[Hook])
    await at.engine.start()
    at.actions["hook"].outcomes.append({"id": "a"})
    await at.post(at.alert("Hot", node="n1"))
    await at.pass_time(1)
    run = await at.run()
    assert run.status is Status.SUCCEEDED
    assert undo_of(run).status is UndoStatus.DROPPED
    assert "size" in (undo_of(run).because or "")
    (change,) = changes.never_given_back(run, lambda action: True)
    assert (change.step, change.is_reversible) == ("call", False)
    assert change.given_back == "never: how to undo it is not known"
    with pytest.raises(errors.Conflict):
        await at.engine.order(run.id, OrderKind.UNDO, "ann")


async def test_an_action_that_found_the_work_of_another_is_no_change(world: MakeWorld) -> None:
    """It counts neither as applied, nor as taken back by its undo."""
    at = world(book(PLAIN), more=[Hook])
    await at.engine.start()
    at.actions["hook"].outcomes.append({"changed": False, "note": "drained by another already"})
    alert = at.alert("Hot", node="n1")
    await at.post(alert)
    await at.pass_time(1)
    run = await at.run()
    assert (run.status, run.action_taken, run.message) == (Status.SUCCEEDED, None, "nothing had to be done")
    (change,) = changes.of_run(run)
    assert change.unchanged_because == "drained by another already"
    await at.resolve(alert)
    await at.pass_time(1)
    run = await at.run()
    assert undo_of(run).status is UndoStatus.DONE
    assert views.item(run).message == "nothing had to be done"


async def test_a_lasting_act_that_was_not_needed_is_not_listed(world: MakeWorld) -> None:
    """Such as the cancelling of a job that had ended."""
    at = world(book("never").replace(", undo: never", ""), more=[Hook])
    await at.engine.start()
    at.actions["hook"].outcomes.extend([{"changed": False}, {"changed": True}])
    for node in ("n1", "n2"):
        await at.post(at.alert("Hot", node=node))
        await at.pass_time(1)
    listed = [list(changes.never_given_back(run, lambda action: True)) for run in await at.runs()]
    assert list(map(len, listed)) == [0, 1]


async def test_an_undo_that_cannot_be_rendered_prevents_the_act(world: MakeWorld) -> None:
    """Nothing is done that could not be reverted as written."""
    undo = '{action: test.other, with: {amount: "{{ labels.size | int }}"}}'
    at = world(book(undo), more=[Hook])
    await at.engine.start()
    await at.post(at.alert("Hot", node="n1"))
    await at.pass_time(1)
    run = await at.run()
    assert run.status is Status.FAILED
    assert (run.steps[0].error or "").startswith("undo: ")
    assert at.calls() == {}


@pytest.mark.parametrize(("when", "status"), [("on_failure", UndoStatus.DONE), ("never", UndoStatus.AVAILABLE)])
async def test_its_trigger_counts(world: MakeWorld, when: str, status: UndoStatus) -> None:
    """The same triggers as for an action's own undo; a person can always order it."""
    text = book(f"{{when: {when}, action: test.other, with: {{amount: 1}}}}", "  - {action: test.tell}")
    at = world(text, more=[Hook])
    await at.engine.start()
    at.actions["tell"].outcomes.append(errors.PermanentFailure("no"))
    await at.post(at.alert("Hot", node="n1"))
    await at.pass_time(1)
    run = await at.run()
    assert undo_of(run).status is status
    if when == "never":
        await at.engine.order(run.id, OrderKind.UNDO, "ann")
        await at.pass_time(1)
        assert undo_of(await at.run()).status is UndoStatus.DONE


async def test_an_undo_that_the_server_is_not_set_up_for_is_refused_and_stays_pending(world: MakeWorld) -> None:
    """No attempt has another status than those that `Attempt` lists."""
    at = world(book(PLAIN), more=[Hook])
    await at.engine.start()
    at.actions["other"].outcomes.append(errors.NotSetUp("no channel"))
    alert = at.alert("Hot", node="n1")
    await at.post(alert)
    await at.resolve(alert)
    await at.pass_time(1)
    undo = undo_of(await at.run())
    assert (undo.status, undo.error, undo.attempts[0].status) == (UndoStatus.RUNNING, "no channel", "rejected")
    await at.pass_time(10)
    assert undo_of(await at.run()).status is UndoStatus.DONE
