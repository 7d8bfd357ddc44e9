"""Groups: a parent run that gives each member a run of its own, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from tests.unit.engine.world import World
from trainmedic_core.target import Target
from trainmedic_server import errors
from trainmedic_server.domain.run import OrderKind, Run, Status, UndoStatus
from trainmedic_server.ports.store import HistoryFilter

MakeWorld = Callable[..., World]

CAP = """
playbook: rack
on: {alert: PDU}
target: {nodes: {rack: "{{ labels.rack }}"}}
steps:
  - {id: cap, action: test.cap, undo: on_resolve}
"""
RACK = {"attributes:n[1-8]": "rack=r1, pool=h100", "attributes:n[9-200]": "rack=r2, pool=h100"}
LARGE = {"breaker_min_nodes": 50}


def with_rollout(text: str, more: str = "") -> str:
    return f"{CAP}\nrollout: {{{text}}}\n{more}"


async def members(world: World, parent: Run | None = None) -> list[Run]:
    parent = parent or await world.run()
    page, _ = await world.store.page(HistoryFilter(parent=parent.id), 1000, None)
    return list(reversed(page))


def placed(runs: Sequence[Run]) -> list[tuple[str, int | None]]:
    return [(run.target.node or "", run.batch) for run in runs if run.target is not None]


async def test_members_run_in_batches_that_double(world: MakeWorld) -> None:
    """One, then two, then four: the next batch begins when the one before has closed."""
    at = world(CAP, inventory=RACK, **LARGE)
    await at.engine.start()
    at.actions["cap"].outcomes.extend([timedelta(seconds=5)] * 8)
    await at.post(at.alert("PDU", rack="r1"))
    assert placed(await members(at)) == [("n1", 0)]
    await at.pass_time(5)
    assert placed(await members(at)) == [("n1", 0), ("n2", 1), ("n3", 1)]
    await at.pass_time(5)
    assert [batch for _, batch in placed(await members(at))] == [0, 1, 1, 2, 2, 2, 2]
    await at.pass_time(10)
    parent = await at.run()
    assert (parent.status, parent.target_key) == (Status.SUCCEEDED, "nodes:rack=r1")
    assert parent.message == "8 members: 8 succeeded"
    assert at.calls() == {"cap": 8}


async def test_a_group_is_one_story(world: MakeWorld) -> None:
    """The history shows the parent with its batches; members are found by it and by their node."""
    at = world(with_rollout("serial: 50%"), inventory=RACK, **LARGE)
    await at.engine.start()
    await at.post(at.alert("PDU", rack="r1"))
    await at.pass_time(1)
    parent = await at.run()
    kinds = [kind for kind in await at.story() if kind not in ("started",)]
    assert kinds == ["group_frozen", "batch_started", "batch_ended", "batch_started", "batch_ended", "closed"]
    by_node, _ = await at.store.page(HistoryFilter(node="n3"), 10, None)
    assert [run.parent for run in by_node] == [parent.id]
    counts = parent.group
    assert counts is not None
    assert (counts.total, counts.succeeded, counts.batch) == (8, 8, 2)
    record = await at.store.record(parent.id)
    assert record is not None
    assert record.members == tuple(f"node:n{number}" for number in range(1, 9))


async def test_the_end_of_the_alert_undoes_each_member_and_starts_no_more(world: MakeWorld) -> None:
    """Each member gives back what it has changed; those that had not begun never do."""
    at = world(with_rollout("serial: 2"), inventory=RACK, **LARGE)
    await at.engine.start()
    at.actions["cap"].outcomes.extend([{"done": True}, {"done": True}, timedelta(seconds=9), timedelta(seconds=9)])
    alert = at.alert("PDU", rack="r1")
    await at.post(alert)
    await at.pass_time(1)
    await at.resolve(alert)
    await at.pass_time(20)
    parent, runs = await at.run(), await members(at)
    assert len(runs) == 4
    assert [run.steps[0].undo.status for run in runs if run.steps[0].undo] == [UndoStatus.DONE] * 4
    assert at.calls() == {"cap": 4, "uncap": 4}
    assert not parent.is_open
    assert "4 not begun" in parent.message
    assert not parent.owes_undo


async def test_a_closed_group_still_gives_back(world: MakeWorld) -> None:
    """The parent counts as owing while a member does, so that its alert is followed to the end."""
    at = world(with_rollout("serial: 100%"), inventory=RACK, **LARGE)
    await at.engine.start()
    alert = at.alert("PDU", rack="r1")
    await at.post(alert)
    await at.pass_time(1)
    parent = await at.run()
    assert parent.status is Status.SUCCEEDED
    assert parent.owes_undo
    await at.restart(after=3)
    await at.resolve(alert)
    await at.pass_time(1)
    assert at.calls() == {"cap": 8, "uncap": 8}
    assert not (await at.run()).owes_undo


async def test_too_many_errors_stop_the_rollout(world: MakeWorld) -> None:
    """One error more than allowed: no further member starts, those in flight end, the parent fails once."""
    more = "on_failure:\n  - {action: test.tell, when: group.failed == 2}\n"
    at = world(with_rollout("serial: 2, max_errors: 1", more), inventory=RACK, **LARGE)
    await at.engine.start()
    fails = errors.PermanentFailure("no")
    at.actions["cap"].outcomes.extend([fails, {"done": True}, fails, timedelta(seconds=3)])
    await at.post(at.alert("PDU", rack="r1"))
    await at.pass_time(1)
    assert (await at.run()).is_open
    await at.pass_time(5)
    parent = await at.run()
    assert parent.status is Status.FAILED
    assert parent.message == "2 members failed, and max_errors is 1; 4 did not begin"
    assert at.calls() == {"cap": 4, "tell": 1}


async def test_errors_within_the_limit_are_told(world: MakeWorld) -> None:
    """The rollout goes on, and its summary counts what failed."""
    at = world(with_rollout("serial: 4, max_errors: 25%"), inventory=RACK, **LARGE)
    await at.engine.start()
    at.actions["cap"].outcomes.extend([errors.PermanentFailure("no")])
    await at.post(at.alert("PDU", rack="r1"))
    await at.pass_time(1)
    parent = await at.run()
    assert (parent.status, parent.message) == (Status.SUCCEEDED, "8 members: 7 succeeded, 1 failed")


async def test_a_vanished_member_is_replaced_within_its_batch(world: MakeWorld) -> None:
    """A node that is gone when its turn comes is skipped with a reason; a canary that was not tried is none."""
    at = world(with_rollout("serial: [1, 2]"), inventory=dict(RACK), **LARGE)
    await at.engine.start()
    at.actions["cap"].outcomes.extend([timedelta(seconds=5)])
    await at.post(at.alert("PDU", rack="r1"))
    at.inventory["attributes:n[4-8]"] = at.inventory.pop("attributes:n[1-8]")
    at.inventory["attributes:n1"] = "rack=r1"
    await at.pass_time(10)
    runs = await members(at)
    assert [(run.target_key, run.batch, str(run.status)) for run in runs][1:4] == [
        ("node:n2", 1, "not_started"),
        ("node:n3", 1, "not_started"),
        ("node:n4", 1, "succeeded"),
    ]
    assert runs[1].message == "the node n2 is gone"
    assert (await at.run()).message == "8 members: 6 succeeded, 2 skipped"


async def test_cancelling_the_parent_ends_the_members(world: MakeWorld) -> None:
    """One order: members in flight end, what they changed is given back if they say so, none starts."""
    at = world(with_rollout("serial: 3").replace("on_resolve", "on_failure"), inventory=RACK, **LARGE)
    await at.engine.start()
    at.actions["cap"].outcomes.extend([{"done": True}] * 3 + [timedelta(seconds=5)] * 3)
    await at.post(at.alert("PDU", rack="r1"))
    await at.pass_time(1)
    parent = await at.run()
    await at.engine.order(parent.id, OrderKind.CANCEL, "ann")
    await at.pass_time(30)
    parent = await at.run()
    assert parent.status is Status.CANCELLED
    assert parent.message == "cancelled by ann; 8 members: 3 succeeded, 3 cancelled, 2 not begun"
    assert at.calls() == {"cap": 6, "uncap": 3}


async def test_an_order_to_undo_reaches_each_member(world: MakeWorld) -> None:
    """An operator gives back a whole group at once, though its playbook would not."""
    at = world(with_rollout("serial: 100%").replace("on_resolve", "never"), inventory=RACK, **LARGE)
    await at.engine.start()
    await at.post(at.alert("PDU", rack="r1"))
    await at.pass_time(1)
    await at.engine.order((await at.run()).id, OrderKind.UNDO, "ann")
    await at.pass_time(1)
    assert at.calls() == {"cap": 8, "uncap": 8}


async def test_a_pause_holds_further_members(world: MakeWorld) -> None:
    """No member starts during a pause, and the rollout continues after it."""
    at = world(with_rollout("serial: 4"), inventory=RACK, **LARGE)
    await at.engine.start()
    at.actions["cap"].outcomes.extend([timedelta(seconds=5)] * 4)
    await at.post(at.alert("PDU", rack="r1"))
    await at.engine.pause("ann")
    await at.pass_time(3600)
    parent = await at.run()
    assert (len(await members(at)), parent.waiting_on) == (4, "resume")
    await at.engine.resume("ann")
    await at.pass_time(1)
    assert (await at.run()).status is Status.SUCCEEDED


async def test_alerts_of_one_selector_join(world: MakeWorld) -> None:
    """A second alert of the same rack starts no second group."""
    at = world(with_rollout("serial: 4"), inventory=RACK, **LARGE)
    await at.engine.start()
    at.actions["cap"].outcomes.extend([timedelta(seconds=5)] * 4)
    await at.post(at.alert("PDU", rack="r1", feed="a"))
    admission = await at.post(at.alert("PDU", rack="r1", feed="b"))
    assert [str(made.decision) for made in admission.runs] == ["joined"]


async def test_mode_observe_records_the_list_only(world: MakeWorld) -> None:
    """Nothing runs; the history shows what would have."""
    at = world(CAP, inventory=RACK, mode="observe", **LARGE)
    await at.engine.start()
    await at.post(at.alert("PDU", rack="r1"))
    parent = await at.run()
    assert (parent.status, parent.message) == (Status.OBSERVED, "would have applied test.cap to 8 members")
    assert not await members(at)


async def test_an_empty_selection_starts_nothing(world: MakeWorld) -> None:
    """An unknown rack is an unknown target, with what there is."""
    at = world(CAP, inventory=RACK, **LARGE)
    await at.engine.start()
    await at.post(at.alert("PDU", rack="r7"))
    parent = await at.run()
    assert str(parent.decision) == "target_unknown"
    assert parent.message == "nodes:rack=r7 selects nothing: no node has rack=r7; there are r1, r2"


async def test_a_cooldown_is_each_members(world: MakeWorld) -> None:
    """A member whose last run has just ended is skipped; the others run."""
    at = world(with_rollout("serial: 100%", "guards: {cooldown: 1h}"), inventory=RACK, **LARGE)
    await at.engine.start()
    alert = at.alert("PDU", rack="r1")
    await at.post(alert)
    await at.pass_time(1)
    await at.resolve(alert)
    await at.pass_time(1)
    await at.post(at.alert("PDU", rack="r1"))
    await at.pass_time(1)
    parent = (await at.runs())[-1]
    assert parent.status is Status.NOT_STARTED
    assert str(parent.decision) == "cooldown"
    assert parent.message.startswith("8 members: 8 skipped; node:n1: the last run for this target has ended")


async def test_the_breaker_refuses_a_list_whole(world: MakeWorld) -> None:
    """With the default settings, a group on more nodes than the breaker allows does not start, and does not open it."""
    at = world(with_rollout("serial: 1"), inventory=RACK)
    await at.engine.start()
    await at.post(at.alert("PDU", rack="r2"))
    parent = await at.run()
    assert (parent.status, str(parent.decision)) == (Status.NOT_STARTED, "breaker_open")
    assert "with mode: approve, a person can approve the whole list" in parent.message
    assert not at.engine.controls.breaker_open
    assert at.calls() == {}


async def test_a_person_can_approve_a_list_that_the_breaker_would_refuse(world: MakeWorld) -> None:
    """One approval, for this very list; its members neither open the breaker nor count for others."""
    at = world(with_rollout("serial: 100%", "mode: approve"), inventory=RACK)
    await at.engine.start()
    await at.post(at.alert("PDU", rack="r2"))
    parent = await at.run()
    assert parent.status is Status.AWAITING_APPROVAL
    assert "192 members" in parent.message
    await at.engine.order(parent.id, OrderKind.APPROVE, "ann")
    await at.pass_time(1)
    assert (await at.run()).message == "192 members: 192 succeeded"
    assert not at.engine.controls.breaker_open
    await at.post(at.alert("PDU", rack="r1"))
    assert (await at.runs())[-1].status is Status.AWAITING_APPROVAL


async def test_an_approval_by_timeout_vouches_for_nothing(world: MakeWorld) -> None:
    """Nobody has seen the list, so the breaker refuses it whole before the first act."""
    more = "mode: approve\napproval: {timeout: 5m, on_timeout: approve}"
    at = world(with_rollout("serial: 1", more), inventory=RACK)
    await at.engine.start()
    await at.post(at.alert("PDU", rack="r2"))
    await at.pass_time(301)
    parent = await at.run()
    assert (parent.status, str(parent.decision)) == (Status.NOT_STARTED, "breaker_open")
    assert at.calls() == {}


async def test_a_group_waits_where_the_breaker_has_no_room(world: MakeWorld) -> None:
    """Other runs have used up what is allowed: the group starts no member, opens nothing, and goes on later."""
    single = "playbook: one\non: {alert: Hot}\ntarget: {node: '{{ labels.node }}'}\nsteps: [{action: test.other}]"
    at = world(with_rollout("serial: 4"), single, inventory=RACK, breaker_min_nodes=8, breaker_share=0.01)
    await at.engine.start()
    at.actions["cap"].outcomes.extend([timedelta(seconds=5)] * 4)
    await at.post(at.alert("PDU", rack="r1"))
    for node in ("n20", "n21", "n22"):
        await at.post(at.alert("Hot", node=node))
    await at.pass_time(60)
    parent = (await at.runs())[0]
    assert parent.waiting_on == "members"
    assert parent.message.startswith("no further member starts: ")
    assert len(await members(at, parent)) == 5
    assert not at.engine.controls.breaker_open
    await at.pass_time(7200)
    assert (await at.run(parent.id)).message == "8 members: 8 succeeded"


async def test_a_kill_at_any_moment_makes_each_act_once(world: MakeWorld) -> None:
    """The server dies again and again: each member has one run and one act, and the batches stay."""
    for seconds in (0, 1, 4, 5, 6, 9, 10, 11, 14, 15):
        at = world(with_rollout("serial: 3"), inventory=RACK, **LARGE)
        await at.engine.start()
        at.actions["cap"].outcomes.extend([timedelta(seconds=5)] * 30)
        await at.post(at.alert("PDU", rack="r1"))
        await at.pass_time(seconds)
        await at.restart(after=2)
        await at.pass_time(1)
        await at.restart(after=2)
        await at.pass_time(60)
        parent, runs = await at.run(), await members(at)
        assert (parent.status, parent.message) == (Status.SUCCEEDED, "8 members: 8 succeeded"), seconds
        assert sorted(placed(runs)) == [(f"n{number}", (number - 1) // 3) for number in range(1, 9)]
        ids = {(call.target.key, call.command_id) for call in at.actions["cap"].calls}
        assert len(ids) == 8, seconds


async def test_a_group_holds_no_lock(world: MakeWorld) -> None:
    """A run on the whole cluster waits for a member, not for the group, and the group for the run."""
    whole = "playbook: whole\non: {alert: Hot}\ntarget: cluster\nsteps: [{action: test.other}]"
    at = world(with_rollout("serial: 1"), whole, inventory=RACK, **LARGE)
    await at.engine.start()
    at.actions["cap"].outcomes.extend([timedelta(seconds=5)] * 8)
    await at.post(at.alert("PDU", rack="r1"))
    await at.post(at.alert("Hot"))
    await at.pass_time(60)
    assert [str(run.status) for run in await at.runs()] == ["succeeded", "succeeded"]
    assert Target.of_key("nodes:rack=r1").kind == "group"


async def test_explain_shows_list_and_batches(world: MakeWorld) -> None:
    """The list as it is now, the batches, and the steps with the first member's names."""
    named = with_rollout("serial: [1, 3], max_errors: 25%").replace("undo:", "with: {amount: 3}, undo:")
    at = world(named, inventory=RACK, **LARGE)
    await at.engine.start()
    ((one,),) = [each.playbooks for each in await at.engine.explain([at.alert("PDU", rack="r1")])]
    assert (one.target, str(one.decision)) == ("nodes:rack=r1", "started")
    shown = "node:n1, node:n2, node:n3, node:n4, node:n5 and 3 more"
    assert one.guards == (
        f"members: 8: {shown}; the steps are those of the first",
        "rollout: batches of 1, 3, 3, 1; at most 2 may fail",
    )
    assert [(step.id, step.params) for step in one.steps] == [("cap", {"amount": 3.0})]
