"""What a run does next, and what it has changed and owes back, told while it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

from tests.unit.engine.books import CAP
from tests.unit.engine.world import Scripted, World
from trainmedic_server.api.views import HeldByView
from trainmedic_server.domain import changes
from trainmedic_server.domain.run import OrderKind, Run, UndoStatus
from trainmedic_server.domain.topology import AgentTopology
from trainmedic_server.domain.upcoming import Upcoming

ASK = """
playbook: ask
on: {alert: Hot}
target: {node: "{{ labels.node }}"}
steps:
  - approve: "Cap {{ labels.node }}? It cools."
    timeout: 30m
  - id: never
    when: labels.node == "other"
    action: test.other
  - id: cap
    action: test.cap
    with: {amount: "{{ labels.watts }}"}
    undo: on_resolve
  - id: by_outcome
    when: steps.cap.output.done
    action: test.other
    with: {amount: "{{ steps.cap.output.amount }}"}
  - wait_for: resolved
    timeout: 10m
"""


async def _next(world: World, run: Run) -> Upcoming | None:
    record = await world.store.record(run.id)
    assert record is not None
    return await world.engine.upcoming(record.run, record.alerts, record.orders)


async def test_a_run_that_asks_says_what_it_would_do() -> None:
    """With rendered parameters, past steps whose condition does not hold, and until when the answer counts."""
    world = World(ASK)
    await world.engine.start()
    await world.post(world.alert(node="node-1", watts="300"))
    run = await world.run()
    told = await _next(world, run)
    assert told is not None
    assert (told.step, told.action, told.params) == ("cap", "test.cap", {"amount": 300.0})
    assert (told.waits_for, told.at_deadline) == ("approval: Cap node-1? It cools", "the run fails")
    assert told.deadline == run.created_at + timedelta(minutes=30)
    await world.engine.stop()


@pytest.mark.parametrize(
    ("question", "end"),
    [
        ("timeout: 30m, on_error: continue", "the run continues"),
        ("timeout: 30m, on_timeout: reject, on_error: continue", "the run is rejected"),
        ("timeout: 30m, on_timeout: continue", "the run continues"),
    ],
)
async def test_a_question_says_what_its_deadline_brings(question: str, end: str) -> None:
    """A rejection ends the run, whatever `on_error` says."""
    world = World(
        ASK.replace("\n    timeout: 30m\n  - id: never", "\n  - id: never").replace(
            '- approve: "Cap {{ labels.node }}? It cools."', f'- {{approve: "Cap it?", {question}}}'
        )
    )
    await world.engine.start()
    await world.post(world.alert(node="node-1", watts="300"))
    told = await _next(world, await world.run())
    assert told is not None
    assert told.at_deadline == end
    await world.engine.stop()


async def test_a_question_of_mode_approve_says_that_it_is_asked_again() -> None:
    """Half an hour after its deadline, while the alert fires: only then does it count as rejected or not."""
    world = World(ASK.replace("playbook: ask\n", "playbook: ask\nmode: approve\n"))
    await world.engine.start()
    await world.post(world.alert(node="node-1", watts="300"))
    run = await world.run()
    told = await _next(world, run)
    assert told is not None
    assert (told.now, told.deadline) == ("approval", run.created_at + timedelta(hours=1))
    assert told.at_deadline == "it is asked again 30m later"
    await world.pass_time(3700)
    assert (await world.run()).is_open
    await world.engine.stop()


async def test_what_depends_on_an_outcome_says_so() -> None:
    """While the step before it is at work, its parameters are unknown, and are not guessed."""
    world = World(ASK.replace('  - approve: "Cap {{ labels.node }}? It cools."\n    timeout: 30m\n', ""))
    await world.engine.start()
    world.actions["cap"].outcomes.append("hang")
    await world.post(world.alert(node="node-1", watts="300"))
    told = await _next(world, await world.run())
    assert told is not None
    assert (told.now, told.step, told.at_deadline) == ("cap", "by_outcome", "the attempt has failed")
    assert told.params == {}
    assert told.note is not None
    assert told.note.startswith("only if steps.cap.output.done; its parameters depend on the run: ")
    await world.engine.stop()


async def test_a_run_that_was_cancelled_in_the_middle_of_a_step_has_no_next_step() -> None:
    """What is in work is waited for; that the run goes on after it would not be true."""
    world = World(ASK.replace('  - approve: "Cap {{ labels.node }}? It cools."\n    timeout: 30m\n', ""))
    await world.engine.start()
    world.actions["cap"].outcomes.append("hang")
    await world.post(world.alert(node="node-1", watts="300"))
    await world.engine.order((await world.run()).id, OrderKind.CANCEL, "ann")
    told = await _next(world, await world.run())
    assert told is not None
    assert (told.now, told.step, told.outcome, told.note) == ("cap", None, "cancelled", "ann has ended it")
    assert told.deadline is not None
    await world.engine.stop()


async def test_a_run_that_waits_for_its_target_says_who_has_it() -> None:
    """By the other run's id; the first one waits for its alert, and then succeeds."""
    slow = CAP + "  - wait_for: resolved\n    timeout: 20m\n"
    world = World(slow, slow.replace("playbook: cap", "playbook: other"))
    await world.engine.start()
    alert = world.alert(node="node-1", gpu="0")
    await world.post(alert)
    first, second = await world.runs()
    told, waiting = await _next(world, first), await _next(world, second)
    assert told is not None
    assert waiting is not None
    assert (told.waits_for, told.step, told.outcome) == ("Hot to resolve", None, "succeeded")
    assert told.deadline == first.created_at + timedelta(minutes=20)
    assert (waiting.waits_for, waiting.holder) == (f"gpu:node-1/0, held by run {first.id}", first.id)
    assert (waiting.step, waiting.params) == ("cap", {"amount": 80.0})
    holder = waiting.held_by
    assert holder is not None
    assert (holder.run_id, holder.playbook, holder.target, holder.alert_name) == (
        first.id,
        "cap",
        "gpu:node-1/0",
        "Hot",
    )
    assert (holder.doing, holder.until, holder.at_deadline) == (
        "waits for Hot to resolve",
        told.deadline,
        "the run fails",
    )
    assert waiting.waiting_since == second.created_at
    await world.engine.stop()


CLEAN = """
playbook: clean
on: {alert: Full}
target: node
steps:
  - {id: files, action: test.clean, timeout: 10m}
  - {id: free, wait_for: resolved, timeout: 5m}
"""
FENCE = "{playbook: fence, on: {alert: Broken}, target: node, steps: [{action: test.other}]}"
SLOW_CAP = CAP + "  - {wait_for: resolved, timeout: 20m}\n"


class Clean(Scripted):
    """Changes the disks of a node only."""

    name = "test.clean"
    changes_disks_only: ClassVar[bool] = True


class Drain(Scripted):
    """Moves work off a node."""

    name = "test.drain"
    leaves_disks: ClassVar[bool] = True

    @classmethod
    def reaches_disks(cls, params: Mapping[str, Any]) -> bool:
        return params.get("amount") == 7


async def test_a_drain_does_not_wait_for_a_full_disk_of_its_node() -> None:
    """Nor the disk for the drained node's repair, which takes days. One with a further change of the node waits."""
    drain = "{playbook: drain, on: {alert: Broken}, target: node, steps: [{action: test.drain}, {wait_for: resolved}]}"
    reboot = "{playbook: reboot, on: {alert: Hung}, target: node, steps: [{action: test.drain}, {action: test.other}]}"
    world = World(CLEAN, drain, reboot, more=[Clean, Drain])
    await world.engine.start()
    world.actions["clean"].outcomes.append(timedelta(minutes=8))
    await world.post(world.alert("Full", node="node-1"))
    await world.post(world.alert("Broken", node="node-1"))
    assert world.calls() == {"clean": 1, "drain": 1}, "while files are deleted"
    await world.post(world.alert("Broken", node="node-2"))
    await world.post(world.alert("Full", node="node-2"))
    assert world.calls() == {"clean": 2, "drain": 2}
    world.actions["clean"].outcomes.append(timedelta(minutes=8))
    await world.post(world.alert("Full", node="node-4"))
    await world.post(world.alert("Hung", node="node-4"))
    assert world.calls() == {"clean": 3, "drain": 2}
    await world.engine.stop()


async def test_only_the_attempt_that_reaches_the_disks_waits_for_the_cleaning_in_flight() -> None:
    """Not the drain before it, nor for the alert after the cleaning."""
    check = """
playbook: check
on: {alert: Broken}
target: node
steps: [{action: test.drain}, {action: test.drain, with: {amount: 7}}]
"""
    world = World(CLEAN, check, more=[Clean, Drain])
    await world.engine.start()
    world.actions["clean"].outcomes.append(timedelta(minutes=8))
    await world.post(world.alert("Full", node="node-1"))
    await world.post(world.alert("Broken", node="node-1"))
    assert world.calls() == {"clean": 1, "drain": 1}
    await world.pass_time(9 * 60)
    assert world.calls() == {"clean": 1, "drain": 2}
    full, checked = await world.runs()
    assert (full.is_open, checked.status.value) == (True, "succeeded")
    await world.engine.stop()


async def test_a_full_disk_does_not_wait_for_a_hot_gpu_of_its_node() -> None:
    """Nor the GPU for the disk: a cap is made while files are deleted. What fences the whole node waits for both."""
    world = World(SLOW_CAP, CLEAN, FENCE, more=[Clean])
    await world.engine.start()
    await world.post(world.alert("Hot", node="node-1", gpu="0"))
    world.actions["clean"].outcomes.append(timedelta(minutes=8))
    await world.post(world.alert("Full", node="node-1"))
    await world.post(world.alert("Hot", node="node-1", gpu="1"))
    assert world.calls() == {"cap": 2, "clean": 1}
    await world.post(world.alert("Broken", node="node-1"))
    await world.pass_time(1)
    hot, full, _, fence = await world.runs()
    waiting = await _next(world, fence)
    assert waiting is not None
    assert waiting.held_by is not None
    assert waiting.holder == hot.id
    await world.restart(after=1)
    assert world.calls() == {"cap": 2, "clean": 2}, "after a restart the same locks are taken"
    assert (await world.run(fence.id)).waiting_on == "target"
    assert (await world.run(full.id)).is_open
    await world.engine.stop()


async def test_gpus_that_agents_report_are_told_apart_whatever_names_them() -> None:
    """A GPU by index and one by UUID are both capped at once, also after a restart. Targets keep the labels' names."""
    world = World(SLOW_CAP)
    gpus = [{"uuid": "GPU-a", "index": 0}, {"uuid": "GPU-b", "index": 1}]
    world.agents = AgentTopology.of({"node-1": {"gpus": gpus}})
    await world.engine.start()
    for gpu in ("GPU-b", "0", "1"):
        await world.post(world.alert(node="node-1", gpu=gpu))
    assert world.calls() == {"cap": 2}
    by_uuid, by_index, same = await world.runs()
    assert [run.target_key for run in (by_uuid, by_index)] == ["gpu:node-1/GPU-b", "gpu:node-1/0"]
    waiting = await _next(world, same)
    assert waiting is not None
    assert waiting.waits_for == f"gpu:node-1/1, held by run {by_uuid.id}"
    await world.restart(after=1)
    runs = await world.runs()
    assert [run.waiting_on for run in runs] == ["resolved", "resolved", "target"]
    await world.engine.stop()


async def test_a_run_that_waits_for_a_gpu_that_may_be_another_says_so() -> None:
    """No agent reports the two names. Once one does, the run goes on by itself."""
    world = World(SLOW_CAP)
    await world.engine.start()
    await world.post(world.alert(node="node-1", gpu="3"))
    await world.post(world.alert(node="node-1", gpu="GPU-5"))
    first, second = await world.runs()
    waiting = await _next(world, second)
    assert waiting is not None
    assert waiting.waits_for == f"gpu:node-1/GPU-5, which may be the same GPU as gpu:node-1/3 of run {first.id}"
    assert waiting.holder == first.id
    shown = HeldByView.model_validate(waiting.held_by)
    assert (shown.run_id, shown.is_certain) == (first.id, False)
    gpus = [{"uuid": "GPU-3", "index": 3}, {"uuid": "GPU-5", "index": 5}]
    world.agents = AgentTopology.of({"node-1": {"gpus": gpus}})
    await world.pass_time(60)
    assert world.calls() == {"cap": 2}
    await world.engine.stop()


async def test_a_run_names_all_that_wait_before_it() -> None:
    """Up to the one that can act: the last run waits for a node's queue, and that for a GPU."""
    at = World(SLOW_CAP, FENCE)
    await at.engine.start()
    await at.post(at.alert("Hot", node="node-1", gpu="0"))
    await at.post(at.alert("Broken", node="node-1"))
    await at.post(at.alert("Hot", node="node-1", gpu="1"))
    hot, fence, last = await at.runs()
    waiting = await _next(at, last)
    assert waiting is not None
    assert waiting.waits_for == f"gpu:node-1/1, behind run {fence.id}", "which waits too, and holds nothing"
    first = waiting.held_by
    assert first is not None
    assert (first.run_id, first.doing) == (fence.id, f"waits for node:node-1, held by run {hot.id}")
    assert first.held_by is not None
    assert (first.held_by.run_id, first.held_by.doing) == (hot.id, "waits for Hot to resolve")
    assert first.held_by.held_by is None
    await at.engine.stop()


async def test_two_runs_that_clean_the_same_disks_come_one_after_the_other() -> None:
    """The later one says which run it waits for, and what that one does."""
    world = World(CLEAN, CLEAN.replace("playbook: clean", "playbook: also"), more=[Clean])
    await world.engine.start()
    world.actions["clean"].outcomes.append(timedelta(minutes=8))
    await world.post(world.alert("Full", node="node-1"))
    await world.pass_time(60)
    assert world.calls() == {"clean": 1}
    first, second = await world.runs()
    waiting = await _next(world, second)
    assert waiting is not None
    holder = waiting.held_by
    assert holder is not None
    assert (holder.run_id, holder.doing, holder.at_deadline) == (
        first.id,
        "carries out step files",
        "the attempt has failed",
    )
    assert holder.until == first.created_at + timedelta(minutes=10)
    await world.engine.stop()


async def test_a_run_that_changes_more_than_disks_locks_its_whole_node() -> None:
    """One step of another kind is enough, also behind a failure; one that only tells changes nothing."""
    tells = CLEAN + "on_failure: [{action: test.tell}]\n"
    acts = CLEAN.replace("clean\n", "acting\n") + "on_failure: [{action: test.other}]\n"
    for playbook, waits in ((tells, False), (acts, True)):
        world = World(SLOW_CAP, playbook, more=[Clean])
        await world.engine.start()
        await world.post(world.alert("Hot", node="node-1", gpu="0"))
        await world.post(world.alert("Full", node="node-1"))
        assert ((await world.runs())[1].waiting_on == "target") is waits
        await world.engine.stop()


async def test_a_closed_run_says_what_it_still_gives_back() -> None:
    """Until its alert resolves; then nothing is next, and nothing is changed any more."""
    world = World(CAP)
    await world.engine.start()
    world.actions["cap"].outcomes.append({"previous_watts": 700, "limit_watts": 560, "lease_seconds": 300})
    alert = world.alert(node="node-1", gpu="0")
    await world.post(alert)
    run = await world.run()
    told = await _next(world, run)
    assert told is not None
    assert (told.kind, told.action, told.waits_for) == ("undo", "test.uncap", "Hot to resolve")
    [change] = changes.of_run(run, ["Hot"])
    assert (change.target, change.action) == ("gpu:node-1/0", "test.cap")
    assert (change.before, change.after, change.is_certain) == ("700 W", "560 W", True)
    assert (change.given_back, change.lease) == ("when Hot resolves", timedelta(minutes=5))
    (step, *others), texts = run.steps, []
    assert step.undo is not None
    for retry_at in (None, world.clock.now()):  # not reverted before the undo is confirmed
        undo = replace(step.undo, status=UndoStatus.RUNNING, retry_at=retry_at)
        [change] = changes.of_run(replace(run, steps=(replace(step, undo=undo), *others)))
        texts.append(change.given_back)
    assert texts == ["as soon as its undo is confirmed", "when the next attempt to undo it succeeds"]
    await world.resolve(alert)
    over = await world.run()
    assert await _next(world, over) is None
    assert list(changes.of_run(over)) == []
    await world.engine.stop()


def test_a_difference_is_told_as_the_action_told_it() -> None:
    """By the members that actions use; where there is none, nothing is made up."""
    assert changes.difference({"before": 0.001, "after": 0.0005, "scale": 0.5}) == ("0.001", "0.0005")
    assert changes.difference({"before": {"cordoned": False}, "after": {"cordoned": True}}) == (
        "cordoned no",
        "cordoned yes",
    )
    assert changes.difference({"previous": 8, "count": 2}) == ("8", "2")
    assert changes.difference({"before": None, "after": "bad"}) == ("none", "bad")
    assert changes.difference({"done": True}) == (None, None)
