"""``rollout.check``: the parent's steps after each batch, and what their end means for the next one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.unit.engine.test_groups import CAP, LARGE, RACK, members, placed
from tests.unit.engine.world import Scripted, World
from trainmedic_server import errors
from trainmedic_server.domain.approval import Terms
from trainmedic_server.domain.run import OrderKind, Status
from trainmedic_server.engine.admission_changes import ByHand
from trainmedic_server.ports.actions import Call

MakeWorld = Callable[..., World]
FITS = "{id: fits, wait_for: {action: test.look, every: 5s}, timeout: 1m}"


def checked(*steps: str, serial: str = "3", more: str = "") -> str:
    return f"{CAP}\nrollout: {{serial: {serial}, check: [{', '.join(steps)}]}}\n{more}"


async def begun(at: World) -> list[int | None]:
    return [batch for _, batch in placed(await members(at))]


async def test_the_next_batch_starts_when_the_check_holds(world: MakeWorld) -> None:
    """It is made anew after each batch, after the last one too."""
    at = world(checked(FITS), inventory=RACK, **LARGE)
    await at.engine.start()
    at.actions["look"].outcomes.append(errors.PermanentFailure("not yet"))
    await at.post(at.alert("PDU", rack="r1"))
    parent = await at.run()
    assert (await begun(at), parent.waiting_on, parent.batch) == ([0] * 3, "wait", 0)
    await at.pass_time(60)
    parent = await at.run()
    assert (parent.status, parent.message, parent.batch) == (Status.SUCCEEDED, "8 members: 8 succeeded", 2)
    assert await begun(at) == [0] * 3 + [1] * 3 + [2] * 2
    assert at.calls() == {"cap": 8, "look": 4}
    one = ["batch_started", "batch_ended", "wait_started", "wait_ended"]
    story = [kind for kind in await at.story() if kind not in ("started", "group_frozen", "wait_changed")]
    assert story == [*one * 3, "closed"]


async def test_a_failed_check_stops_the_rollout(world: MakeWorld) -> None:
    """No further member begins, the parent fails and says how far it came, and its last steps know the reason."""
    more = "on_failure: [{action: test.tell, when: steps.fits.status == 'timed_out' and group.not_begun == 5}]"
    at = world(checked(FITS, more=more), inventory=RACK, **LARGE)
    await at.engine.start()
    at.actions["look"].outcomes.extend([errors.PermanentFailure("too hot")] * 30)
    await at.post(at.alert("PDU", rack="r1"))
    await at.pass_time(120)
    parent = await at.run()
    assert parent.status is Status.FAILED
    assert parent.message.startswith("step fits: test.look was not true for long enough in time; at the end: it does")
    assert parent.message.endswith("; 8 members: 3 succeeded, 5 not begun")
    assert {"cap": 3, "tell": 1}.items() <= at.calls().items()


async def test_a_check_may_tolerate(world: MakeWorld) -> None:
    """``on_timeout: continue`` gives each batch some time; ``on_error`` tolerates an action."""
    wait = FITS.replace("timeout: 1m", "timeout: 1m, on_timeout: continue")
    at = world(checked(wait, "{action: test.tell, on_error: continue}"), inventory=RACK, **LARGE)
    await at.engine.start()
    at.actions["look"].outcomes.extend([errors.PermanentFailure("too hot")] * 100)
    at.actions["tell"].outcomes.append(errors.PermanentFailure("no"))
    await at.post(at.alert("PDU", rack="r1"))
    await at.pass_time(59)
    assert await begun(at) == [0] * 3
    await at.pass_time(130)
    assert (await at.run()).message == "8 members: 8 succeeded"
    assert at.calls()["tell"] == 3


async def test_each_batch_is_asked_about_on_its_own(world: MakeWorld) -> None:
    """A person approves the next batch, which the question names; the answer counts for no other."""
    at = world(checked("{id: sure, approve: '', timeout: 1h}"), inventory=RACK, **LARGE)
    await at.engine.start()
    await at.post(at.alert("PDU", rack="r1"))
    parent = await at.run()
    assert parent.status is Status.AWAITING_APPROVAL
    over = "Batch 1 of nodes:rack=r1 is over (8 members: 3 succeeded, 5 not begun)."
    assert parent.message == f"{over} May rack start the next batch?"
    (ahead,) = Terms.of(parent.step(("check", 0))).steps
    assert (ahead.targets, ahead.note) == (
        ("node:n4", "node:n5", "node:n6"),
        "for each of 3 members, batch 2; shown for node:n4",
    )
    await at.engine.order(parent.id, OrderKind.APPROVE, "ann")
    await at.pass_time(1)
    parent = await at.run()
    assert (await begun(at), parent.status) == ([0] * 3 + [1] * 3, Status.AWAITING_APPROVAL)
    assert Terms.of(parent.step(("check", 0))).asked == 2
    record = await at.store.record(parent.id)
    assert record is not None
    ahead_of_it = await at.engine.upcoming(record.run, record.alerts, record.orders)
    assert ahead_of_it is not None
    assert (ahead_of_it.now, ahead_of_it.at_deadline) == ("sure", "the run fails")
    assert ahead_of_it.note == "the next batch starts then, if members are left"
    await at.engine.order(parent.id, OrderKind.REJECT, "bob")
    await at.pass_time(1)
    parent = await at.run()
    assert (parent.status, parent.message) == (
        Status.REJECTED,
        "rejected by bob; 8 members: 6 succeeded, 2 not begun",
    )


async def test_a_check_can_wait_for_the_alert(world: MakeWorld) -> None:
    """As many members as it takes: the rollout ends when the alert does."""
    at = world(checked("{wait_for: resolved, timeout: 10m, on_timeout: continue}", serial="1"), inventory=RACK, **LARGE)
    await at.engine.start()
    alert = at.alert("PDU", rack="r1")
    await at.post(alert)
    await at.pass_time(601)
    assert await begun(at) == [0, 1]
    await at.resolve(alert)
    await at.pass_time(1)
    parent = await at.run()
    assert parent.status is Status.SUCCEEDED
    assert parent.message == "8 members: 2 succeeded, 6 not begun; the alert resolved before they could begin"
    assert at.calls() == {"cap": 2, "uncap": 2}


async def test_the_end_of_the_alert_makes_a_question_moot(world: MakeWorld) -> None:
    """Nothing starts after it, so nobody has to answer, and the run has not failed."""
    at = world(checked("{approve: go on?}"), inventory=RACK, **LARGE)
    await at.engine.start()
    alert = at.alert("PDU", rack="r1")
    await at.post(alert)
    await at.resolve(alert)
    await at.pass_time(1)
    parent = await at.run()
    assert parent.status is Status.SUCCEEDED
    assert at.calls() == {"cap": 3, "uncap": 3}


async def test_news_of_members_do_not_disturb_a_check(world: MakeWorld) -> None:
    """A member that reverts after its failure changes the counts while the check waits."""
    text = (
        checked("{wait: 1m}", more="")
        .replace("on_resolve", "on_failure")
        .replace("serial: 3", "serial: 3, max_errors: 8")
    )
    text = text.replace("\nrollout", "  - {id: then, action: test.other}\nrollout")
    at = world(text, inventory=RACK, **LARGE)
    await at.engine.start()
    at.actions["other"].outcomes.append(errors.PermanentFailure("no"))
    at.actions["uncap"].outcomes.append(timedelta(seconds=20))
    await at.post(at.alert("PDU", rack="r1"))
    await at.pass_time(30)
    assert await begun(at) == [0] * 3
    await at.pass_time(170)
    assert (await at.run()).message == "8 members: 7 succeeded, 1 failed"


async def test_a_polled_check_sees_news_of_members(world: MakeWorld) -> None:
    """The look goes on while members revert."""
    text = checked(FITS).replace("on_resolve", "on_failure").replace("serial: 3", "serial: 3, max_errors: 8")
    text = text.replace("\nrollout", "  - {id: then, action: test.other}\nrollout")
    at = world(text, inventory=RACK, **LARGE)
    await at.engine.start()
    at.actions["other"].outcomes.append(errors.PermanentFailure("no"))
    at.actions["uncap"].outcomes.append(timedelta(seconds=7))
    at.actions["look"].outcomes.extend([errors.PermanentFailure("not yet")] * 3)
    await at.post(at.alert("PDU", rack="r1"))
    await at.pass_time(60)
    assert (await at.run()).message == "8 members: 7 succeeded, 1 failed"
    assert at.calls()["look"] == 6


async def test_too_many_errors_need_no_check(world: MakeWorld) -> None:
    """The rollout has failed already."""
    at = world(checked("{action: test.look}"), inventory=RACK, **LARGE)
    await at.engine.start()
    at.actions["cap"].outcomes.append(errors.PermanentFailure("no"))
    await at.post(at.alert("PDU", rack="r1"))
    await at.pass_time(1)
    assert (await at.run()).status is Status.FAILED
    assert at.calls() == {"cap": 3}


async def test_a_kill_at_any_moment_of_a_check(world: MakeWorld) -> None:
    """The check goes on where it was, each member is acted on once, and a batch is not checked twice."""
    for seconds in (0, 1, 4, 5, 6, 10, 11, 16, 20, 25, 31, 40):
        at = world(checked(FITS, "{id: told, action: test.tell}", "{wait: 10s}"), inventory=RACK, **LARGE)
        await at.engine.start()
        at.actions["cap"].outcomes.extend([timedelta(seconds=5)] * 30)
        at.actions["look"].outcomes.append(errors.PermanentFailure("not yet"))
        await at.post(at.alert("PDU", rack="r1"))
        await at.pass_time(seconds)
        await at.restart(after=2)
        await at.pass_time(1)
        await at.restart(after=2)
        await at.pass_time(120)
        parent = await at.run()
        assert (parent.status, parent.message) == (Status.SUCCEEDED, "8 members: 8 succeeded"), seconds
        assert await begun(at) == [0] * 3 + [1] * 3 + [2] * 2
        assert len({call.command_id for call in at.actions["cap"].calls}) == 8, seconds
        assert len({call.command_id for call in at.actions["tell"].calls}) == 3, seconds
        assert (await at.story()).count("batch_ended") == 3, seconds


async def test_explain_and_the_question_ahead_show_the_check(world: MakeWorld) -> None:
    """Its steps are the group's, so what depends on the counts is not known yet."""
    at = world(checked(FITS, "{action: test.tell, when: group.failed == 0}"), inventory=RACK, **LARGE)
    await at.engine.start()
    ((one,),) = [each.playbooks for each in await at.engine.explain([at.alert("PDU", rack="r1")])]
    assert [(step.phase, step.id, str(step.verdict)) for step in one.steps] == [
        ("steps", "cap", "runs"),
        ("check", "fits", "runs"),
        ("check", "check-2", "undetermined"),
    ]


RETURNS = """
playbook: rack
on: {alert: PDU}
target: {nodes: {rack: "{{ labels.rack }}"}}
rollout: {serial: 4, max_errors: 1, check: [{id: calm, wait_for: {action: test.calm, every: 5s}, timeout: 20s}]}
steps:
  - {id: out, action: test.cap}
  - {id: fit, wait_for: {action: test.look, every: 5s}, timeout: 20s}
  - {id: back, action: test.uncap}
"""


class Calm(Scripted):
    name = "test.calm"
    harmful = False


@pytest.mark.parametrize("end", ["calm", "errors", "check", "resolved", "cancelled", "restarted", "retried"])
async def test_no_undo_returns_a_node_whose_check_failed(world: MakeWorld, end: str) -> None:
    """Whatever ends the run: the rollout itself, too many errors, the group's check, the alert, a person, a restart."""
    at = world(RETURNS, inventory=RACK, more=[Calm], **LARGE)
    await at.engine.start()
    unfit = {"node:n1", "node:n3"} if end == "errors" else {"node:n2"}

    async def look(call: Call) -> dict[str, object]:
        if call.target.key in unfit:
            raise errors.PermanentFailure("a GPU is missing")
        return {}

    at.actions["look"].perform = look  # type: ignore[method-assign]
    at.actions["calm"].outcomes.extend([errors.PermanentFailure("no")] * (20 if end == "check" else 0))
    alert = at.alert("PDU", rack="r1")
    await at.post(alert)
    await at.pass_time(15)
    parent = await at.run()
    if end == "resolved":
        await at.resolve(alert)
    if end == "cancelled":
        await at.engine.order(parent.id, OrderKind.CANCEL, "ann")
    if end == "restarted":
        await at.restart(after=10)
    await at.pass_time(120)
    if end == "retried":
        await at.engine.retry(parent.id, ByHand("ann"))
        await at.pass_time(120)
    await at.resolve(alert)
    await at.pass_time(600)
    runs = await at.runs()
    assert not any(run.is_open or run.owes_undo for run in runs)
    returned = {call.target.key for call in at.actions["uncap"].calls}
    drained = {call.target.key for call in at.actions["cap"].calls}
    assert drained - returned == unfit
    ended = {"errors": "failed", "check": "failed", "cancelled": "cancelled"}.get(end, "succeeded")
    assert str(runs[0].status) == ended
