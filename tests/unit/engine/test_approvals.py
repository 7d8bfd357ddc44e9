"""What people are asked, who may answer, and what follows when nobody does."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.unit.engine.books import CAP
from tests.unit.engine.world import World
from trainmedic_server import errors
from trainmedic_server.domain import approval
from trainmedic_server.domain.approval import Terms
from trainmedic_server.domain.run import Event, OrderKind, Run, Status, StepStatus
from trainmedic_server.engine.recorder import Recorder

MakeWorld = Callable[..., World]

ASKING = """
playbook: careful
on: {alert: Hot}
target: node
steps:
  - id: sure
    approve: {message: "Cap {{ target.node }}?", QUESTION}
    timeout: 30m
    on_timeout: ON_TIMEOUT
  - {id: cap, action: test.cap, with: {amount: "{{ labels.watts | int }}"}, undo: on_resolve}
  - {id: look, action: test.look, when: steps.cap.output.done}
on_failure:
  - action: test.tell
"""


def asking(question: str = "count: 1", on_timeout: str = "fail") -> str:
    return ASKING.replace("QUESTION", question).replace("ON_TIMEOUT", on_timeout)


async def asked(w: World, **labels: str) -> Run:
    await w.post(w.alert(node="n1", watts="300", **labels))
    return await w.run()


async def events(w: World, kind: str) -> list[Event]:
    record = await w.store.record((await w.run()).id)
    assert record is not None
    return [event for event in record.events if event.kind == kind]


async def test_a_question_says_what_would_be_done(world: MakeWorld) -> None:
    """Rendered when it is asked, and on record: what depends on the run says so."""
    run = await asked(world(asking()))
    step = approval.waiting_step(run)
    assert step is not None
    assert (step.message, run.message) == ("Cap n1?", "Cap n1?")
    cap, look = Terms.of(step).steps
    assert (cap.id, cap.action, cap.params, cap.targets, cap.nodes) == (
        "cap",
        "test.cap",
        {"amount": 300.0},
        ("node:n1",),
        ("n1",),
    )
    assert (look.targets, look.nodes, look.gpus) == ((), (), 0)
    assert look.note == "would depend on how the run goes: steps.cap.output.done"


async def test_mode_approve_names_the_playbook_and_the_target_and_ends_by_itself(world: MakeWorld) -> None:
    """It asks for an hour, and, as long as the alert goes on, again half an hour later."""
    w = world(CAP, mode="approve")
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    step = approval.waiting_step(await w.run())
    assert step is not None
    assert step.message == "May cap act on gpu:n1/0?"
    assert [ahead.action for ahead in Terms.of(step).steps] == ["test.cap"]
    assert Terms.of(step).gpus == 1
    await w.pass_time(3601)
    assert [event.data["outcome"] for event in await events(w, "approval_ended")] == ["unanswered"]
    assert (await w.run()).status is Status.AWAITING_APPROVAL
    await w.pass_time(1800)
    assert [event.data["asked"] for event in await events(w, "approval_requested")] == [1, 2]
    await w.resolve(alert)
    run = await w.run()
    assert (run.status, w.calls()) == (Status.CANCELLED, {})


async def test_a_question_that_nobody_answered_in_time_can_be_answered_before_it_is_asked_again(
    world: MakeWorld,
) -> None:
    """Who comes five minutes late need not wait for the rest of the half hour."""
    w = world(CAP, mode="approve")
    await w.post(w.alert(gpu="0", node="n1"))
    await w.pass_time(3900)
    await w.engine.order((await w.run()).id, OrderKind.APPROVE, "ann")
    await w.pass_time(0)
    run = await w.run()
    assert (run.status, w.calls()) == (Status.SUCCEEDED, {"cap": 1})
    assert approval.approved_by(run) == ("ann",)


async def test_people_are_reminded_until_somebody_answers(world: MakeWorld) -> None:
    """And not of what was answered."""
    w = world(asking("remind: 10m"))
    run = await asked(w)
    await w.pass_time(1201)
    assert len(await events(w, "approval_reminded")) == 2
    await w.engine.order(run.id, OrderKind.APPROVE, "ann")
    await w.pass_time(3600)
    assert len(await events(w, "approval_reminded")) == 2


async def test_only_those_who_are_named_may_approve(world: MakeWorld) -> None:
    """By the name of a token or by a group; rejecting does no harm, so that anybody may."""
    w = world(asking("by: [hardware, ann]"))
    run = await asked(w)
    with pytest.raises(errors.NotEntitled, match="is approved by hardware or ann"):
        await w.engine.order(run.id, OrderKind.APPROVE, "bob", groups=frozenset({"on-call"}))
    await w.engine.order(run.id, OrderKind.APPROVE, "bob", groups=frozenset({"hardware"}))
    await w.pass_time(0)
    assert w.calls() == {"cap": 1, "look": 1}


async def test_anybody_may_reject(world: MakeWorld) -> None:
    """Whoever may approve."""
    w = world(asking("by: [ann]"))
    run = await asked(w)
    await w.engine.order(run.id, OrderKind.REJECT, "bob")
    await w.pass_time(0)
    assert ((await w.run()).status, w.calls()) == (Status.REJECTED, {})


async def test_two_different_people_have_to_approve_where_the_playbook_says_so(world: MakeWorld) -> None:
    """One person twice is one; who has approved is on record before the other has, over a restart too."""
    w = world(asking("count: 2"))
    run = await asked(w)
    await w.engine.order(run.id, OrderKind.APPROVE, "ann")
    with pytest.raises(errors.Conflict, match=r"ann has approved step sure of run .* already; it takes 2 different"):
        await w.engine.order(run.id, OrderKind.APPROVE, "ann")
    await w.restart()
    assert approval.approved_by(await w.run()) == ("ann",)
    assert w.calls() == {}
    await w.engine.order(run.id, OrderKind.APPROVE, "bob")
    await w.pass_time(0)
    run = await w.run()
    assert (run.status, approval.approved_by(run)) == (Status.SUCCEEDED, ("ann", "bob"))
    with pytest.raises(errors.Conflict, match="does not wait for approval"):
        await w.engine.order(run.id, OrderKind.APPROVE, "carl")


async def test_who_approved_an_earlier_round_has_not_approved_what_is_asked_again(world: MakeWorld) -> None:
    """It is rendered anew; so that takes as many people as the first time, and one who has answered may again."""
    w = world(asking("count: 2, ask_again: 10m", "reject"))
    run = await asked(w)
    await w.engine.order(run.id, OrderKind.APPROVE, "ann")
    await w.pass_time(1860)  # nobody else has answered; until it is asked again the question stands as it was
    assert approval.approved_by(await w.run()) == ("ann",)
    await w.pass_time(600)
    assert (Terms.of((await w.run()).steps[0]).asked, approval.approved_by(await w.run())) == (2, ())
    await w.restart()
    run = await w.engine.order(run.id, OrderKind.APPROVE, "bob")
    assert (run.status, approval.approved_by(run)) == (Status.AWAITING_APPROVAL, ("bob",))
    await w.engine.order(run.id, OrderKind.APPROVE, "ann")
    await w.pass_time(0)
    run = await w.run()
    assert (run.status, approval.approved_by(run)) == (Status.SUCCEEDED, ("bob", "ann"))


@pytest.mark.parametrize(
    ("question", "on_timeout", "told"),
    [
        ("count: 1, ask_again: 10m", "reject", "ask_again"),
        ("count: 1", "reject", "reject"),
        ("count: 1", "fail\n    on_error: continue", "continue"),
        ("by: [ann], escalate: {by: [lead], timeout: 20m, on_timeout: reject}", "escalate", "escalate"),
    ],
)
async def test_a_question_records_what_follows_its_deadline(
    world: MakeWorld, question: str, on_timeout: str, told: str
) -> None:
    """`ask_again` and `on_error: continue` replace the playbook's `on_timeout`."""
    w = world(asking(question, on_timeout))
    assert Terms.of((await asked(w)).steps[0]).on_timeout == told


async def test_an_approval_that_comes_while_it_is_asked_again_is_of_the_round_before(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is committed between the moment at which the run was read and the one at which the new question is on record:
    what is asked then has been approved by nobody."""
    w = world(asking("count: 1, ask_again: 10m", "reject"))
    run = await asked(w)
    record, late = Recorder.record, []

    async def approved_before(recorder: Recorder, run: Run, *change: Any) -> bool:
        if not late and run.steps and Terms.of(run.steps[0]).asked == 2:
            late.append(await w.engine.order(run.id, OrderKind.APPROVE, "ann"))
        return await record(recorder, run, *change)

    monkeypatch.setattr(Recorder, "record", approved_before)
    await w.pass_time(2500)
    run = await w.run()
    assert late
    assert (run.status, approval.approved_by(run), w.calls()) == (Status.AWAITING_APPROVAL, (), {})
    await w.engine.order(run.id, OrderKind.APPROVE, "ann")
    await w.pass_time(0)
    assert approval.approved_by(await w.run()) == ("ann",)


@pytest.mark.parametrize(
    ("on_timeout", "status", "calls"),
    [
        ("fail", Status.FAILED, {"tell": 1}),
        ("reject", Status.REJECTED, {}),
        ("approve", Status.SUCCEEDED, {"cap": 1, "look": 1}),
        ("continue", Status.SUCCEEDED, {"cap": 1, "look": 1}),
    ],
)
async def test_a_time_out_means_what_the_playbook_says(
    world: MakeWorld, on_timeout: str, status: Status, calls: dict[str, int]
) -> None:
    """Nobody who did not approve stands as an approver."""
    w = world(asking(on_timeout=on_timeout))
    await asked(w)
    await w.pass_time(1801)
    run = await w.run()
    assert (run.status, w.calls(), approval.approved_by(run)) == (status, calls, ())


async def test_a_question_is_handed_on_to_others_who_have_their_own_time(world: MakeWorld) -> None:
    """Those who were asked first may answer still."""
    w = world(asking("by: [ann], escalate: {by: [lead], timeout: 20m, on_timeout: reject}", "escalate"))
    run = await asked(w)
    with pytest.raises(errors.NotEntitled):
        await w.engine.order(run.id, OrderKind.APPROVE, "lead")
    await w.pass_time(1801)
    (handed_on,) = await events(w, "approval_escalated")
    assert handed_on.data["by"] == ["ann", "lead"]
    await w.pass_time(600)
    await w.engine.order(run.id, OrderKind.APPROVE, "lead")
    await w.pass_time(0)
    assert (await w.run()).status is Status.SUCCEEDED


async def test_those_to_whom_a_question_is_handed_on_are_reminded_too(world: MakeWorld) -> None:
    w = world(asking("remind: 9m, escalate: {by: [lead], timeout: 20m, on_timeout: reject}", "escalate"))
    await asked(w)
    for _ in range(10):
        await w.pass_time(299)
    assert len(await events(w, "approval_reminded")) == 3 + 2


async def test_a_question_that_was_handed_on_in_vain_ends_as_the_playbook_says(world: MakeWorld) -> None:
    """After the time of the second."""
    w = world(asking("escalate: {by: [lead], timeout: 20m, on_timeout: reject}", "escalate"))
    await asked(w)
    await w.pass_time(1801)
    await w.restart(after=600)
    assert (await w.run()).status is Status.AWAITING_APPROVAL
    await w.pass_time(601)
    run = await w.run()
    assert (run.status, run.message, w.calls()) == (Status.REJECTED, "nobody approved in time", {})


async def test_a_server_that_was_down_reminds_once_and_asks_again_once(world: MakeWorld) -> None:
    """What fell into the downtime is not made up for."""
    w = world(asking("remind: 5m, ask_again: 1h"))
    await asked(w)
    await w.restart(after=14 * 60)
    assert len(await events(w, "approval_reminded")) == 1
    await w.pass_time(17 * 60)
    assert [event.data["outcome"] for event in await events(w, "approval_ended")] == ["unanswered"]


@pytest.mark.parametrize("ends_by", ["resolution", "timeout"])
async def test_a_rejection_that_was_accepted_is_what_ends_the_question(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch, ends_by: str
) -> None:
    """It is committed after the run was read, and before the other end of the question is on record. The run is told
    as rejected, as the operator's answer said."""
    w = world(asking(on_timeout="continue"))
    alert = w.alert(node="n1", watts="300")
    await w.post(alert)
    run = await w.run()
    record, rejected = Recorder.record, []

    async def rejected_before(recorder: Recorder, run: Run, *change: Any) -> bool:
        if not rejected and run.steps[0].status is not StepStatus.WAITING:
            rejected.append(run.steps[0].status)
            await w.engine.order(run.id, OrderKind.REJECT, "ann", "no")
        return await record(recorder, run, *change)

    monkeypatch.setattr(Recorder, "record", rejected_before)
    if ends_by == "resolution":
        await w.resolve(alert)
    await w.pass_time(2500)
    run = await w.run()
    assert rejected, "the question did not end"
    assert rejected != [StepStatus.REJECTED]
    assert (run.status, run.message, run.steps[0].output["note"], w.calls()) == (
        Status.REJECTED,
        "rejected by ann",
        "no",
        {},
    )


async def test_a_rejection_that_was_accepted_outlasts_a_long_downtime(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is killed before it has planned with it."""
    w = world(asking())
    run = await asked(w)
    monkeypatch.setattr(w.engine._workers, "touch", lambda _: None)
    await w.engine.order(run.id, OrderKind.REJECT, "ann")
    assert (await w.run()).status is Status.AWAITING_APPROVAL
    await w.restart(after=24 * 3600)
    await w.pass_time(0)
    assert ((await w.run()).status, w.calls()) == (Status.REJECTED, {})


@pytest.mark.parametrize("answer", [OrderKind.APPROVE, OrderKind.REJECT])
async def test_an_answer_that_ends_its_question_after_the_deadline_is_a_persons(
    world: MakeWorld, monkeypatch: pytest.MonkeyPatch, answer: OrderKind
) -> None:
    """As where the server was killed before it had planned with it. A timeout is nobody's answer."""
    w = world(asking(on_timeout="approve" if answer is OrderKind.APPROVE else "reject"))
    run, began = await asked(w), w.clock.now()
    monkeypatch.setattr(w.engine._workers, "touch", lambda _: None)
    await w.engine.order(run.id, answer, "ann")
    await w.restart(after=3600)
    assert (await w.run()).status is not Status.AWAITING_APPROVAL
    await w.post(w.alert(node="n2", watts="300"))
    await w.pass_time(2000)
    for now in (w.clock.now(), w.clock.now() + timedelta(days=3)):  # by runs, and by whole days
        tally = (await w.store.tally(began - timedelta(days=3), now + timedelta(seconds=1)))["careful"]
        assert tally.person_seconds == {3600.0: 1}


@pytest.mark.parametrize(
    ("by", "name", "groups", "may"),
    [
        ("user:ann", "ann", [], True),
        ("user:ann", "bob", ["ann", "user:ann"], False),
        ("group:hardware", "bob", ["hardware"], True),
        ("group:hardware", "hardware", ["group:hardware"], False),
        ("hardware", "bob", ["hardware"], True),
        ("hardware", "hardware", [], True),
        ("user:", "", [], False),
        ("group:", "bob", [""], False),
        ("team:red", "bob", ["team:red"], True),
    ],
)
def test_a_name_can_say_whether_it_is_a_users_or_a_groups(by: str, name: str, groups: list[str], may: bool) -> None:
    """A login that somebody chose does not pass for the group, nor a group for the person."""
    assert Terms(by=(by,)).may_be_answered_by(name, groups) is may
