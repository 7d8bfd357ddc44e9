"""After the alert of a run has resolved nothing harmful begins, and what a run owes is given back by how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest

from tests.unit.engine.world import Scripted, World
from trainmedic_core.target import Target, TargetKind
from trainmedic_server import errors
from trainmedic_server.domain.run import OrderKind, Status, StepStatus, UndoStatus
from trainmedic_server.engine.admission_changes import ByHand
from trainmedic_server.engine.manual_runs import StartOrder
from trainmedic_server.ports.actions import Call, Inverse

HEAD = "playbook: book\non: {alert: Hot}\ntarget: node\nsteps:\n"
WAIT = "  - {id: over, wait_for: resolved, timeout: 1h}\n"


class Evict(Scripted):
    """Changes something again and again, and asks before each time."""

    name = "test.evict"

    async def perform(self, call: Call) -> Mapping[str, Any]:
        self.calls.append(call)
        for number in range(10):
            assert call.clearance is not None
            if await call.clearance() == "resolved":
                failure = errors.NoLongerWanted("stopped, because the alert resolved", {"evicted": number})
                failure.is_begun = number > 0
                await asyncio.sleep(1)
                raise failure
            await asyncio.sleep(5)
        return {"evicted": 10}

    @classmethod
    def inverse(cls, params: Any, output: Mapping[str, Any] | None) -> Inverse | None:
        return Inverse("test.uncap", {"amount": 1})


class Mend(Scripted):
    name = "test.mend"
    gives_back = True


class Quiet(Scripted):
    name = "test.quiet"
    silences = frozenset({TargetKind.NODE})


class Hold(Scripted):
    name = "test.hold"
    is_hold = True

    @classmethod
    def inverse(cls, params: Any, output: Mapping[str, Any] | None) -> Inverse | None:
        return Inverse("test.uncap", {"amount": 1})


async def resolve_after(w: World, seconds: float, then: float = 60) -> None:
    await w.engine.start()
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.pass_time(seconds)
    await w.resolve(alert)
    await w.pass_time(then)


async def lived(steps: str, resolved: float | None, *, length: float = 100, order: OrderKind | None = None) -> World:
    """A world in which the alert resolved at this second, and then all came to its end."""
    world = World(HEAD + steps, more=(Evict, Mend, Quiet, Hold))
    world.actions["other"].outcomes.append(timedelta(seconds=10))
    await world.engine.start()
    alert = world.alert(node="n1")
    await world.post(alert)
    if resolved is not None:
        await world.pass_time(resolved)
        await world.resolve(alert)
    await world.pass_time(length)
    if order is not None:
        await world.engine.order((await world.run()).id, order, "ann")
        await world.pass_time(5)
    return world


def statuses(run: Any) -> dict[str, str]:
    return {step.id: str(step.status) for step in run.steps}


async def test_what_stands_behind_the_wait_is_done_and_what_stands_before_is_not() -> None:
    """The message about a step that was not carried out is not sent either."""
    steps = "  - {id: a, action: test.other}\n  - {id: b, action: test.cap}\n  - {id: c, action: test.tell}\n"
    w = await lived(steps + WAIT + "  - {id: d, action: test.cap}\n  - {id: e, action: test.tell}\n", 5)
    run = await w.run()
    expected = {"a": "succeeded", "b": "skipped", "c": "skipped", "over": "succeeded", "d": "succeeded"}
    assert statuses(run) == expected | {"e": "succeeded"}
    assert run.status is Status.SUCCEEDED
    assert run.message == "applied test.other, test.cap, test.tell; the alert resolved before b, c began"


async def test_without_a_wait_the_run_ends_there_with_success() -> None:
    """Its message says what was not begun."""
    w = await lived("  - {id: a, action: test.other}\n  - {id: b, action: test.cap}\n", 5)
    run = await w.run()
    assert (run.status, run.message) == (
        Status.SUCCEEDED,
        "applied test.other; the alert resolved before b began",
    )


async def test_a_repair_between_two_waits_is_not_begun_though_nothing_asks_for_the_time_out() -> None:
    """A wait that continues on a time-out gives a repair time; what follows it is the next repair."""
    steps = (
        "  - {id: a, action: test.cap}\n"
        "  - {id: patience, wait_for: resolved, timeout: 1m, on_timeout: continue}\n"
        "  - {id: b, action: test.cap}\n"
    )
    w = await lived(steps + WAIT, 20)
    assert statuses(await w.run()) == {"a": "succeeded", "patience": "succeeded", "b": "skipped", "over": "succeeded"}
    w = await lived(steps, 20)
    assert statuses(await w.run())["b"] == "succeeded"


async def test_an_action_in_the_middle_of_it_stops_and_the_run_goes_on() -> None:
    """What it did is on record, and given back as the playbook says."""
    steps = "  - {id: a, action: test.evict, timeout: 5m, undo: on_resolve}\n  - {id: t, action: test.tell}\n"
    w = await lived(steps + WAIT + "  - {id: d, action: test.cap}\n", 12)
    run = await w.run()
    assert statuses(run) == {"a": "cancelled", "t": "skipped", "over": "succeeded", "d": "succeeded"}
    assert (run.steps[0].output, run.steps[0].error) == ({"evicted": 3}, "stopped, because the alert resolved")
    assert run.steps[0].undo is not None
    assert run.steps[0].undo.status is UndoStatus.DONE
    assert run.status is Status.SUCCEEDED
    assert "step_stopped" in await w.story()


async def test_after_a_restart_it_stops_too() -> None:
    """The end of the alert came while no server was up to hear it, or before the attempt was resumed."""
    w = World(HEAD + "  - {id: a, action: test.evict, timeout: 5m}\n" + WAIT, more=(Evict,))
    await w.engine.start()
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.pass_time(7)
    await w.restart()
    await w.pass_time(3)
    await w.resolve(alert)
    await w.pass_time(60)
    assert statuses(await w.run()) == {"a": "cancelled", "over": "succeeded"}


async def test_no_further_attempt_is_made() -> None:
    """Neither after a failure nor where the outcome is not known; what may be in force is given back."""
    steps = "  - {id: a, action: test.cap, retry: {attempts: 5, delay: 30s}, undo: on_resolve}\n"
    for outcome in (errors.TemporaryFailure("busy"), errors.OutcomeUnknown("no answer")):
        w = World(HEAD + steps + WAIT)
        w.actions["cap"].outcomes.append(outcome)
        await resolve_after(w, 10)
        run = await w.run()
        assert statuses(run) == {"a": "cancelled", "over": "succeeded"}
        assert run.steps[0].error is not None
        assert "it was not tried again, because the alert resolved" in run.steps[0].error
        unknown = isinstance(outcome, errors.OutcomeUnknown)
        assert w.calls() == ({"cap": 1, "uncap": 1} if unknown else {"cap": 1})


async def test_what_only_gives_back_is_done_as_long_as_nothing_was_skipped() -> None:
    """Behind a step that was skipped it could give back what was never checked."""
    w = await lived("  - {id: a, action: test.other}\n  - {id: b, action: test.mend}\n", 5)
    assert statuses(await w.run())["b"] == "succeeded"
    steps = "  - {id: a, action: test.other}\n  - {id: b, action: test.cap}\n  - {id: c, action: test.mend}\n"
    w = await lived(steps, 5)
    assert statuses(await w.run()) == {"a": "succeeded", "b": "skipped", "c": "skipped"}


async def test_an_alert_that_the_run_may_have_silenced_proves_nothing() -> None:
    """The steps behind the one that silenced it are carried out, and a question is still asked."""
    ask = "  - {id: sure, approve: 'go on?', timeout: 5m, on_timeout: approve}\n"
    steps = (
        "  - {id: a, action: test.quiet}\n  - {id: o, action: test.other}\n" + ask + "  - {id: b, action: test.cap}\n"
    )
    w = await lived(steps, 5, length=400)
    assert statuses(await w.run()) == {"a": "succeeded", "o": "succeeded", "sure": "succeeded", "b": "succeeded"}


async def test_an_attempt_without_an_answer_may_have_silenced_it_before_the_next_one() -> None:
    """As after the last one: the step is tried again under the same command id, and the run goes on."""
    w = World(
        HEAD + "  - {id: a, action: test.quiet, retry: {attempts: 3, delay: 30s}}\n  - {id: b, action: test.cap}\n",
        more=(Quiet,),
    )
    w.actions["quiet"].outcomes.append(errors.OutcomeUnknown("no answer"))
    await resolve_after(w, 10)
    assert statuses(await w.run()) == {"a": "succeeded", "b": "succeeded"}
    assert len({call.command_id for call in w.actions["quiet"].calls}) == 1


async def test_a_run_by_hand_without_an_alert_is_not_stopped() -> None:
    """There is nothing that could resolve."""
    w = World(HEAD + "  - {id: a, action: test.cap}\n" + WAIT + "  - {id: b, action: test.cap}\n")
    await w.engine.start()
    await w.engine.start_run(StartOrder("book", Target(TargetKind.NODE, node="n1")), ByHand("ann"))
    await w.pass_time(10)
    assert statuses(await w.run()) == {"a": "succeeded", "over": "skipped", "b": "succeeded"}


async def test_a_condition_on_a_step_that_was_not_carried_out_fails_nothing() -> None:
    """Its output is not there."""
    steps = "  - {id: a, action: test.other}\n  - {id: b, action: test.cap}\n"
    behind = "  - {id: c, action: test.cap, when: 'steps.b.output.done > 0'}\n  - {id: d, action: test.tell}\n"
    w = await lived(steps + WAIT + behind, 5)
    run = await w.run()
    assert (statuses(run)["c"], statuses(run)["d"], run.status) == ("skipped", "succeeded", Status.SUCCEEDED)


async def test_a_question_about_a_repair_ends_and_the_run_goes_on_behind_its_wait() -> None:
    """As it has changed something, which is put right there."""
    steps = "  - {id: a, action: test.cap}\n  - {id: sure, approve: 'go on?'}\n  - {id: b, action: test.cap}\n"
    w = await lived(steps + WAIT + "  - {id: d, action: test.mend}\n", 5)
    run = await w.run()
    assert statuses(run) == {"a": "succeeded", "sure": "skipped", "b": "skipped", "over": "succeeded", "d": "succeeded"}
    assert run.status is Status.SUCCEEDED


async def test_a_question_about_a_repair_between_two_waits_is_not_asked() -> None:
    """After the alert has resolved during the first wait the repair is not begun, whatever a person would answer."""
    steps = (
        "  - {id: a, action: test.cap}\n"
        "  - {id: patience, wait_for: resolved, timeout: 1m, on_timeout: continue}\n"
        "  - {id: sure, approve: 'go on?'}\n"
        "  - {id: b, action: test.cap}\n"
    )
    w = await lived(steps + WAIT + "  - {id: after, approve: 'put it back?'}\n", 20)
    run = await w.run()
    assert statuses(run)["sure"] == "skipped"
    assert (statuses(run)["b"], statuses(run)["after"], run.status) == ("skipped", "waiting", Status.AWAITING_APPROVAL)


async def test_in_on_failure_people_are_told_and_nothing_more_is_changed() -> None:
    """Only the steps that change something are skipped there."""
    steps = "  - {id: a, action: test.other}\n  - {id: b, action: test.look}\n"
    w = World(HEAD + steps + "on_failure:\n  - {id: f, action: test.cap}\n  - {id: g, action: test.tell}\n")
    w.actions["other"].outcomes.append(timedelta(seconds=10))
    w.actions["look"].outcomes.append(errors.PermanentFailure("blind"))
    await resolve_after(w, 5)
    run = await w.run()
    assert (statuses(run)["f"], statuses(run)["g"], run.status) == ("skipped", "succeeded", Status.FAILED)


async def test_an_alert_that_fires_again_at_once_is_worked_on_again() -> None:
    """An attempt that stopped for its end is taken up, and the run does not end."""
    w = World(HEAD + "  - {id: a, action: test.evict, timeout: 5m}\n" + WAIT, more=(Evict,))
    await w.engine.start()
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.pass_time(2)
    await w.resolve(alert)
    await w.pass_time(3.5)
    await w.post(w.alert(node="n1"))
    await w.pass_time(100)
    run = await w.run()
    assert (run.steps[0].status, len(run.steps[0].attempts)) == (StepStatus.SUCCEEDED, 2)
    assert run.waiting_on == "resolved"


@pytest.mark.parametrize("order", [OrderKind.CANCEL, OrderKind.REJECT])
@pytest.mark.parametrize("undo", [False, True])
async def test_a_run_that_a_person_ends_gives_back_what_is_for_a_failure(order: OrderKind, undo: bool) -> None:
    """At once; the rest when the alert resolves, or at once where the person wants it."""
    steps = (
        "  - {id: a, action: test.cap, with: {amount: 1}, undo: on_failure}\n"
        "  - {id: b, action: test.cap, with: {amount: 2}, undo: on_resolve}\n"
        "  - {id: c, action: test.cap, with: {amount: 3}}\n"
        "  - {id: sure, approve: 'go on?'}\n"
    )
    w = World(HEAD + steps)
    await w.engine.start()
    alert = w.alert(node="n1")
    await w.post(alert)
    run_id = (await w.run()).id
    await w.engine.order(run_id, order, "ann", undo=undo)
    await w.pass_time(5)
    run = await w.run()
    assert run.status is (Status.CANCELLED if order is OrderKind.CANCEL else Status.REJECTED)
    given_back = [call.params.model_dump()["amount"] for call in w.actions["uncap"].calls]
    assert sorted(given_back) == ([1, 2, 3] if undo else [1])
    assert run.owes_undo is not undo
    await w.resolve(alert)
    await w.pass_time(5)
    assert not (await w.run()).owes_undo


@pytest.mark.parametrize("trigger", ["never", "on_resolve", "on_failure"])
@pytest.mark.parametrize("ends", ["reject", "cancel", "time_out"])
async def test_what_was_held_while_people_decided_goes_on_when_they_have(trigger: str, ends: str) -> None:
    """Whatever its undo says: the alert of a job that stands still may never resolve."""
    steps = f"  - {{id: a, action: test.hold, undo: {trigger}}}\n  - {{id: sure, approve: 'go on?', timeout: 10m}}\n"
    w = World(HEAD + steps, more=(Hold,))
    await w.engine.start()
    await w.post(w.alert(node="n1"))
    assert w.calls() == {"hold": 1}
    if ends != "time_out":
        await w.engine.order((await w.run()).id, OrderKind(ends), "ann")
    await w.pass_time(5 if ends != "time_out" else 700)
    assert w.calls() == {"hold": 1, "uncap": 1}
