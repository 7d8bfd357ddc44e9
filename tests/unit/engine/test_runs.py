"""A run from start to close: steps, retries, waits, approvals, failure, undo."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.engine.books import CAP
from tests.unit.engine.world import World
from trainmedic_core.target import Target, TargetKind
from trainmedic_server import errors
from trainmedic_server.domain.run import Decision, OrderKind, Status, StepStatus, UndoStatus

MakeWorld = Callable[..., World]

RETRYING = """
playbook: retrying
on: {alert: Hot}
target: node
steps:
  - id: act
    action: test.cap
    timeout: 20s
    retry: {attempts: 3, delay: 2s, backoff: 2}
    undo: on_resolve
"""


async def test_a_known_failure_is_tried_again_under_a_new_id_ever_later(world: MakeWorld) -> None:
    """Backoff doubles; a receiver that remembers the failed id does not answer for the new one."""
    w = world(RETRYING)
    w.actions["cap"].outcomes += [errors.TemporaryFailure("busy"), errors.TemporaryFailure("busy")]
    await w.post(w.alert(node="n1"))
    assert (await w.run()).status is Status.WAITING
    await w.pass_time(10)
    calls = w.actions["cap"].calls
    assert [(call.issued_at - calls[0].issued_at).total_seconds() for call in calls] == [0, 2, 6]
    assert len({call.command_id for call in calls}) == 3
    assert (await w.run()).status is Status.SUCCEEDED
    assert w.actions["cap"].settled_ids == [call.command_id for call in calls]


async def test_retries_wait_no_longer_than_allowed_however_many_there_are(world: MakeWorld) -> None:
    """Doubling two seconds 46 times is longer than any duration can be."""
    w = world(RETRYING.replace("attempts: 3, delay: 2s", "attempts: 50, max_delay: 4s, delay: 2s"))
    w.actions["cap"].outcomes += [errors.TemporaryFailure("busy")] * 49
    await w.post(w.alert(node="n1"))
    await w.pass_time(300)
    calls = w.actions["cap"].calls
    assert [(call.issued_at - calls[0].issued_at).total_seconds() for call in calls] == [0, *range(2, 195, 4)]
    assert (await w.run()).status is Status.SUCCEEDED


async def test_an_unknown_outcome_is_tried_again_under_the_same_id(world: MakeWorld) -> None:
    """So that a receiver which applied the command, but whose reply was lost, does not apply it twice."""
    w = world(RETRYING)
    w.actions["cap"].outcomes += ["hang", errors.OutcomeUnknown("no reply")]
    await w.post(w.alert(node="n1"))
    await w.pass_time(120)
    calls = w.actions["cap"].calls
    assert len(calls) == 3
    assert len({call.command_id for call in calls}) == 1
    assert [call.resumed for call in calls] == [False, True, True]
    assert (await w.run()).status is Status.SUCCEEDED


async def test_a_step_whose_outcome_stays_unknown_fails_the_run_and_keeps_its_undo(world: MakeWorld) -> None:
    """It may have happened, so it must be taken back."""
    w = world(RETRYING)
    w.actions["cap"].outcomes += [errors.OutcomeUnknown("no reply")] * 3
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.pass_time(120)
    run = await w.run()
    assert (run.status, run.steps[0].status) == (Status.FAILED, StepStatus.UNKNOWN)
    await w.resolve(alert)
    assert w.calls() == {"cap": 3, "uncap": 1}
    assert w.actions["uncap"].calls[0].undo_of == w.actions["cap"].calls[0].command_id


async def test_a_permanent_failure_is_not_tried_again_and_leaves_nothing_to_undo(world: MakeWorld) -> None:
    """What was certainly not applied is not taken back."""
    w = world(RETRYING)
    w.actions["cap"].outcomes.append(errors.PermanentFailure("rejected: below the floor"))
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.resolve(alert)
    run = await w.run()
    assert run.status is Status.FAILED
    assert run.message == "step act: rejected: below the floor"
    assert run.steps[0].undo is not None
    assert run.steps[0].undo.status is UndoStatus.DROPPED
    assert w.calls() == {"cap": 1}


async def test_an_output_may_hold_values_of_the_servers(world: MakeWorld) -> None:
    """What an action got in its call, such as the target, it may hand back: it is on record as its members."""
    w = world(RETRYING)
    target = Target(TargetKind.NODE, "n1")
    w.actions["cap"].outcomes.append({"target": target, "also": [target]})
    await w.post(w.alert(node="n1"))
    await w.pass_time(120)
    members = {"kind": "node", "node": "n1", "gpu": None, "job": None, "group": None}
    (step,) = (run := await w.run()).steps
    assert (run.status, step.output) == (Status.SUCCEEDED, {"target": members, "also": [members]})


async def test_what_was_carried_out_and_came_out_otherwise_is_not_carried_out_again(world: MakeWorld) -> None:
    """A rollback after which other batches come did happen: `retry` does not repeat it, and its output tells people."""
    w = world(RETRYING)
    w.actions["cap"].outcomes.append(errors.EffectDisproved("other batches come", {"step": 60}))
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.pass_time(120)
    (step,) = (run := await w.run()).steps
    assert (run.status, run.message) == (Status.FAILED, "step act: other batches come")
    assert (step.output, [attempt.status for attempt in step.attempts]) == ({"step": 60}, ["failed"])
    await w.resolve(alert)
    assert w.calls() == {"cap": 1, "uncap": 1}


@pytest.mark.parametrize("failure", [errors.TemporaryFailure, errors.PermanentFailure])
async def test_what_a_failed_action_had_begun_is_taken_back(world: MakeWorld, failure: type[Any]) -> None:
    """A drain that did not end has cordoned the node: also where a later attempt certainly did nothing."""
    w = world(RETRYING)
    begun = failure("2 pods are still there")
    begun.is_begun = True
    w.actions["cap"].outcomes += [begun, errors.PermanentFailure("refused")]
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.pass_time(120)
    assert (await w.run()).status is Status.FAILED
    await w.resolve(alert)
    run = await w.run()
    assert run.steps[0].undo is not None
    assert run.steps[0].undo.status is UndoStatus.DONE
    assert w.calls()["uncap"] == 1


async def test_an_action_that_fails_in_an_undeclared_way_ends_its_attempt_only(world: MakeWorld) -> None:
    """A bug in an action is counted and recorded; the server goes on."""
    w = world(CAP)
    w.actions["cap"].outcomes.append(ZeroDivisionError("secret-token"))
    await w.post(w.alert(gpu="0", node="n1"))
    run = await w.run()
    assert run.status is Status.FAILED
    assert "ZeroDivisionError" in run.message
    assert "secret-token" not in run.message
    assert [run.decision for run in (await w.post(w.alert(gpu="1", node="n1"))).runs] == [Decision.STARTED]


TWO_STAGES = """
playbook: two-stages
on: {alert: Hot}
target: node
steps:
  - {id: cap, action: test.cap, with: {amount: 80}, undo: on_resolve}
  - {id: cooled, wait_for: resolved, timeout: 5m, on_timeout: continue}
  - {id: harder, when: steps.cooled.status == "timed_out", action: test.cap, with: {amount: 60}, undo: on_resolve}
"""


async def test_a_wait_that_resolves_spares_the_harder_step(world: MakeWorld) -> None:
    """And what was taken is given back."""
    w = world(TWO_STAGES)
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.pass_time(60)
    assert (await w.run()).status is Status.WAITING
    await w.resolve(alert)
    run = await w.run()
    assert run.status is Status.SUCCEEDED
    assert [step.status.value for step in run.steps] == ["succeeded", "succeeded", "skipped"]
    assert w.calls() == {"cap": 1, "uncap": 1}


async def test_a_wait_that_times_out_goes_on_where_told_to_and_undo_runs_backwards(world: MakeWorld) -> None:
    """Both caps are given back when the alert resolves, the last one first."""
    w = world(TWO_STAGES)
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.pass_time(301)
    assert (await w.run()).status is Status.SUCCEEDED
    assert (await w.run()).owes_undo
    await w.pass_time(3600)
    await w.resolve(alert)
    assert [call.params.model_dump()["amount"] for call in w.actions["uncap"].calls] == [60, 80]
    assert not (await w.run()).owes_undo


async def test_a_wait_that_times_out_fails_the_run_by_default(world: MakeWorld) -> None:
    """And the steps of on_failure run."""
    w = world(
        """
playbook: verify
on: {alert: Hot}
target: node
steps:
  - {id: cap, action: test.cap, undo: on_failure}
  - {id: cooled, wait_for: resolved, timeout: 1m}
  - {id: after, action: test.other}
on_failure:
  - {action: test.tell, with: {amount: "{{ steps.cap.params.amount }}"}}
"""
    )
    await w.post(w.alert(node="n1"))
    await w.pass_time(61)
    run = await w.run()
    assert run.status is Status.FAILED
    assert [step.status.value for step in run.steps] == ["succeeded", "timed_out", "skipped", "succeeded"]
    assert w.calls() == {"cap": 1, "tell": 1, "uncap": 1}
    assert run.success is False


async def test_an_undo_on_failure_is_not_owed_by_a_run_that_succeeded(world: MakeWorld) -> None:
    """By hand it stays possible."""
    w = world(CAP.replace("on_resolve", "on_failure"))
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    await w.resolve(alert)
    run = await w.run()
    assert (run.status, run.owes_undo, w.calls()) == (Status.SUCCEEDED, False, {"cap": 1})
    await w.engine.order(run.id, OrderKind.UNDO, "alice")
    await w.pass_time(0)
    assert w.calls() == {"cap": 1, "uncap": 1}


async def test_on_error_continue_goes_on_to_the_next_step(world: MakeWorld) -> None:
    """A failed step that is told to continue does not fail the run, which says so all the same."""
    w = world(
        """
playbook: tolerant
on: {alert: Hot}
target: node
steps:
  - {id: one, action: test.cap, on_error: continue}
  - {id: two, action: test.other, when: steps.one.status == "failed"}
"""
    )
    w.actions["cap"].outcomes.append(errors.PermanentFailure("no"))
    await w.post(w.alert(node="n1"))
    run = await w.run()
    assert (run.status, run.message) == (Status.SUCCEEDED, "applied test.other; step one: no")
    assert w.calls() == {"cap": 1, "other": 1}


async def test_an_attempt_that_waits_for_somebody_says_so_while_it_waits(world: MakeWorld) -> None:
    """An open run is never silent about why nothing happens: for whom it waits, then why it tries again."""
    w = world(
        """
playbook: patient
on: {alert: Hot}
target: node
steps:
  - {id: one, action: test.cap, retry: {attempts: 2, delay: 10s}}
"""
    )
    w.actions["cap"].outcomes.extend(["hang", {"done": True}])
    await w.post(w.alert(node="n1"))
    await w.pass_time(0)
    tell = w.actions["cap"].calls[0].report_wait
    assert tell is not None
    await tell("nobody is there")
    run = await w.run()
    assert (run.status, run.message) == (Status.RUNNING, "nobody is there")
    assert "attempt_waits" in await w.story(run.id)
    await w.pass_time(36)
    assert (await w.run()).message == "the action did not end in time"
    await w.pass_time(10)
    assert (await w.run()).message == "applied test.cap"


async def test_pause_holds_harm_back_but_not_undo_nor_looking(world: MakeWorld) -> None:
    """An open run stops before its next harmful step; waits and undo go on."""
    w = world(
        """
playbook: looker
on: {alert: Slow}
target: node
steps:
  - {id: gone, wait_for: resolved, timeout: 1m, on_timeout: continue}
  - {id: look, action: test.look}
  - {id: act, action: test.other}
""",
        CAP,
    )
    capped = w.alert(gpu="0", node="n2")
    await w.post(capped)
    await w.post(w.alert("Slow", node="n1"))
    await w.engine.pause("alice")
    await w.resolve(capped)
    await w.pass_time(90)
    assert w.calls() == {"cap": 1, "uncap": 1, "look": 1}
    held = (await w.runs())[-1]
    assert (held.status, held.waiting_on) == (Status.WAITING, "resume")
    await w.engine.resume("alice")
    await w.pass_time(0)
    assert w.calls()["other"] == 1


async def test_a_run_held_by_a_long_pause_is_stale_and_does_not_act(world: MakeWorld) -> None:
    """What queued up meanwhile is not replayed."""
    w = world(
        """
playbook: slow
on: {alert: Hot}
target: node
steps:
  - {id: gone, wait_for: resolved, timeout: 1m, on_timeout: continue}
  - {id: act, action: test.other}
"""
    )
    await w.post(w.alert(node="n1"))
    await w.engine.pause("alice")
    await w.pass_time(1000)
    await w.engine.resume("alice")
    await w.pass_time(0)
    run = await w.run()
    assert (run.status, run.decision) == (Status.NOT_STARTED, Decision.STALE)
    assert w.calls() == {}


async def test_two_runs_never_work_on_the_same_target_at_once(world: MakeWorld) -> None:
    """A node covers its GPUs: the later run waits its turn, then acts."""
    on_node = CAP.replace("playbook: cap", "playbook: drain").replace("alert: Hot", "alert: Down")
    on_node = on_node.replace('{gpu: "{{ labels.gpu }}", node: "{{ labels.node }}"}', "node").replace(
        "test.cap", "test.other"
    )
    on_node = on_node.replace("    undo: on_resolve\n", "")
    w = world(CAP, on_node)
    w.actions["cap"].outcomes.append(timedelta(seconds=10))
    await w.post(w.alert("Hot", gpu="0", node="n1"))
    await w.post(w.alert("Down", node="n1"))
    assert w.calls() == {"cap": 1}
    waiting = (await w.runs())[-1]
    assert (waiting.status, waiting.waiting_on) == (Status.WAITING, "target")
    await w.pass_time(11)
    assert w.calls() == {"cap": 1, "other": 1}
    assert [run.status for run in await w.runs()] == [Status.SUCCEEDED, Status.SUCCEEDED]


@pytest.mark.parametrize("why", ["resolved", "age"])
async def test_a_run_whose_alert_goes_stale_while_its_target_is_busy_does_not_act(world: MakeWorld, why: str) -> None:
    """It is recorded as target_busy."""
    other = CAP.replace("playbook: cap", "playbook: other").replace("test.cap", "test.other")
    w = world(CAP.replace("    undo: on_resolve", "    timeout: 1h"), other.replace("    undo: on_resolve\n", ""))
    w.actions["cap"].outcomes.append(timedelta(seconds=1800))
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    runs = await w.runs()
    assert [run.waiting_on for run in runs].count("target") == 1
    if why == "resolved":
        await w.resolve(alert)
    else:
        await w.pass_time(901)
    busy = next(run for run in await w.runs() if run.playbook == "other")
    assert (busy.status, busy.decision) == (Status.NOT_STARTED, Decision.TARGET_BUSY)
    assert "other" not in w.calls()


async def test_mode_approve_asks_before_the_first_step(world: MakeWorld) -> None:
    """And acts when an operator approves, on record."""
    w = world(CAP, mode="approve")
    await w.post(w.alert(gpu="0", node="n1"))
    run = await w.run()
    assert (run.status, w.calls()) == (Status.AWAITING_APPROVAL, {})
    await w.pass_time(1200)
    after = await w.engine.order(run.id, OrderKind.APPROVE, "alice", "go ahead")
    assert after.status in (Status.RUNNING, Status.SUCCEEDED)
    await w.pass_time(0)
    assert (await w.run()).status is Status.SUCCEEDED
    assert w.calls() == {"cap": 1}
    assert "approved" in await w.story()
    with pytest.raises(errors.Conflict):
        await w.engine.order(run.id, OrderKind.APPROVE, "alice")


async def test_a_rejected_run_does_not_act(world: MakeWorld) -> None:
    """Its status says so."""
    w = world(CAP, mode="approve")
    await w.post(w.alert(gpu="0", node="n1"))
    run = await w.engine.order((await w.run()).id, OrderKind.REJECT, "alice")
    assert (run.status, run.message) == (Status.REJECTED, "rejected by alice")
    assert w.calls() == {}


async def test_an_alert_that_resolves_before_anybody_approved_is_stale(world: MakeWorld) -> None:
    """A late approval has nothing to act on."""
    w = world(CAP, mode="approve")
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    await w.resolve(alert)
    run = await w.run()
    assert (run.status, run.decision) == (Status.CANCELLED, Decision.STALE)
    with pytest.raises(errors.Conflict):
        await w.engine.order(run.id, OrderKind.APPROVE, "alice")


async def test_a_cancelled_run_takes_no_further_step(world: MakeWorld) -> None:
    """What it applied is still given back when the alert resolves."""
    w = world(TWO_STAGES)
    alert = w.alert(node="n1")
    await w.post(alert)
    run = await w.engine.order((await w.run()).id, OrderKind.CANCEL, "alice")
    assert (run.status, run.message) == (Status.CANCELLED, "cancelled by alice")
    await w.pass_time(600)
    await w.resolve(alert)
    assert w.calls() == {"cap": 1, "uncap": 1}


async def test_undo_by_hand_takes_back_an_action_that_nobody_would_undo(world: MakeWorld) -> None:
    """On an open run it cancels first."""
    w = world(TWO_STAGES.replace(", undo: on_resolve", ""))
    await w.post(w.alert(node="n1"))
    run = await w.run()
    await w.engine.order(run.id, OrderKind.UNDO, "alice")
    await w.pass_time(0)
    assert (await w.run()).status is Status.CANCELLED
    assert w.calls() == {"cap": 1, "uncap": 1}
    with pytest.raises(errors.Conflict):
        await w.engine.order(run.id, OrderKind.UNDO, "alice")


async def test_an_undo_that_fails_is_tried_again_until_it_works(world: MakeWorld) -> None:
    """It is a duty."""
    w = world(CAP)
    w.actions["uncap"].outcomes += [errors.TemporaryFailure("away")] * 5
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    await w.resolve(alert)
    await w.pass_time(600)
    assert w.calls() == {"cap": 1, "uncap": 6}
    assert (await w.run()).steps[0].undo.status is UndoStatus.DONE  # type: ignore[union-attr]


async def test_orders_for_a_run_that_is_not_there_say_so(world: MakeWorld) -> None:
    """Nothing is written."""
    w = world(CAP)
    with pytest.raises(errors.NotFound):
        await w.engine.order("nothing", OrderKind.CANCEL, "alice")


async def test_the_metrics_tell_what_is_open_and_what_is_owed(world: MakeWorld) -> None:
    """Gauges rise and fall with runs and undo duties, also over a restart; counters tell outcomes."""
    w = world(TWO_STAGES)
    alert = w.alert(node="n1")
    await w.post(alert)

    def value(name: str, **labels: str) -> float | None:
        return w.metrics.registry.get_sample_value(name, labels)

    assert (value("trainmedic_open_runs"), value("trainmedic_undos_owed")) == (1, 1)
    await w.resolve(alert)
    assert (value("trainmedic_open_runs"), value("trainmedic_undos_owed")) == (0, 0)
    assert value("trainmedic_runs_total", playbook="two-stages", status="succeeded") == 1
    assert value("trainmedic_decisions_total", playbook="two-stages", reason="started") == 1
    assert value("trainmedic_undos_total", status="done") == 1


LINKED = """
playbook: linked
on: {alert: Hot}
target: node
steps:
  - {id: ask, approve: "May I? See {{ run.url }}."}
"""


async def test_templates_know_the_address_of_the_run(world: MakeWorld) -> None:
    """`run.url` leads to the run, and is empty where nobody has said where the server is reached."""
    w = world(LINKED, external_url="https://medic.example")
    await w.post(w.alert(node="n1"))
    run = await w.run()
    assert run.step(("steps", 0)).message == f"May I? See https://medic.example/runs/{run.id}."
    without = world(LINKED)
    await without.post(without.alert(node="n1"))
    assert (await without.run()).step(("steps", 0)).message == "May I? See ."


ENDING = """
playbook: ending
on: {alert: Hot}
target: node
steps:
  - {id: act, action: test.cap}
  - {id: over, wait_for: resolved, timeout: 5m}
on_success:
  - {id: look, action: test.look}
  - {id: said, action: test.tell, with: {amount: "{{ steps.look.attempts }}"}}
on_failure:
  - {id: cry, action: test.other}
"""


async def test_on_success_runs_once_all_steps_are_done(world: MakeWorld) -> None:
    """And `on_failure` does not. The run is open until then; its steps stand in the order in which they run."""
    w = world(ENDING)
    await w.post(w.alert(node="n1"))
    assert w.actions["tell"].calls == []
    await w.post(w.alert(node="n1", status="resolved"))
    run = await w.run()
    assert run.status is Status.SUCCEEDED
    assert [(step.id, str(step.status)) for step in run.steps] == [
        ("act", "succeeded"), ("over", "succeeded"), ("look", "succeeded"), ("said", "succeeded"), ("cry", "skipped"),
    ]  # fmt: skip
    assert w.actions["tell"].calls[0].params.amount == 1
    assert await w.store.transact(lambda tx: tx.run(run.id)) == replace(run, touched=())


async def test_on_success_does_not_run_where_the_run_fails(world: MakeWorld) -> None:
    """It would tell people what is not so."""
    w = world(ENDING)
    await w.post(w.alert(node="n1"))
    await w.pass_time(600)
    assert (await w.run()).status is Status.FAILED
    assert (len(w.actions["tell"].calls), len(w.actions["other"].calls)) == (0, 1)


async def test_what_fails_in_on_success_does_not_fail_the_run(world: MakeWorld) -> None:
    """The repair has been made. The failure is on record, and the next step is carried out all the same."""
    w = world(ENDING)
    w.actions["look"].outcomes.append(errors.PermanentFailure("no channel"))
    await w.post(w.alert(node="n1"))
    await w.post(w.alert(node="n1", status="resolved"))
    run = await w.run()
    assert run.status is Status.SUCCEEDED
    assert "step look: no channel" in run.message
    assert len(w.actions["tell"].calls) == 1


async def test_a_kill_in_on_success_goes_on_where_it_was(world: MakeWorld) -> None:
    """As anywhere else in a run."""
    w = world(ENDING)
    w.actions["look"].outcomes.append("hang")
    await w.post(w.alert(node="n1"))
    await w.post(w.alert(node="n1", status="resolved"))
    await w.restart(1)
    run = await w.run()
    assert (run.status, len(w.actions["cap"].calls), len(w.actions["tell"].calls)) == (Status.SUCCEEDED, 1, 1)


async def test_mode_observe_leaves_out_what_depends_on_the_end(world: MakeWorld) -> None:
    """How a run would end is not known."""
    w = world(ENDING, mode="observe")
    await w.post(w.alert(node="n1"))
    messages = {step.id: step.message for step in (await w.run()).steps}
    assert messages["look"] == "is for a run that succeeds"
    assert messages["cry"] == "is for a run that fails"


async def test_runs_that_ask_are_counted_until_they_are_answered(world: MakeWorld) -> None:
    """Over a restart too."""
    w = world(LINKED)
    await w.post(w.alert(node="n1"))

    def asking() -> float | None:
        return w.metrics.registry.get_sample_value("trainmedic_runs_awaiting_approval")

    assert asking() == 1
    await w.restart(1)
    assert asking() == 1
    await w.engine.order((await w.run()).id, OrderKind.APPROVE, "ann")
    assert asking() == 0


TELLING = """
playbook: telling
on: {alert: Hot}
target: node
steps:
  - {id: cap, action: test.cap, undo: on_resolve}
  - {id: tell, action: test.tell, retry: {attempts: 3, delay: 1s}}
  - {id: look, action: test.look}
on_failure:
  - {id: alarm, action: test.tell}
"""
NOT_SENT = "not sent: no notification channel is configured"


async def test_a_missing_channel_fails_no_repair_and_is_on_record(world: MakeWorld) -> None:
    """The step is skipped at once, the rest is done, and the run's message says that nobody was told."""
    w = world(TELLING)
    w.actions["tell"].outcomes.append(errors.NotSetUp(NOT_SENT))
    alert = w.alert(node="n1")
    await w.post(alert)
    await w.pass_time(60)
    run = await w.run()
    tell = run.step(("steps", 1))
    assert (run.status, run.message) == (Status.SUCCEEDED, f"applied test.cap, test.look; step tell: {NOT_SENT}")
    assert (tell.status, tell.message, tell.error) == (StepStatus.SKIPPED, NOT_SENT, None)
    assert [attempt.status for attempt in tell.attempts] == ["rejected"]
    assert w.calls() == {"cap": 1, "tell": 1, "look": 1}
    record = await w.store.record(run.id)
    assert record is not None
    [skipped] = [event for event in record.events if event.kind == "step_skipped"]
    assert skipped.data == {"step": "tell", "action": "test.tell", "why": NOT_SENT}
    await w.resolve(alert)
    assert w.calls()["uncap"] == 1


async def test_a_missing_channel_does_not_hide_that_a_repair_failed(world: MakeWorld) -> None:
    """Nor that an earlier try of the message may have been sent."""
    w = world(TELLING)
    w.actions["look"].outcomes.append(errors.PermanentFailure("blind"))
    w.actions["tell"].outcomes += [errors.OutcomeUnknown("no answer"), *[errors.NotSetUp(NOT_SENT)] * 3]
    await w.post(w.alert(node="n1"))
    await w.pass_time(60)
    run = await w.run()
    assert run.status is Status.FAILED
    assert run.step(("steps", 1)).status is StepStatus.UNKNOWN
    assert run.step(("on_failure", 0)).status is StepStatus.SKIPPED
