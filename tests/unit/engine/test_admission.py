"""What becomes of alerts: new, repeated, duplicated, resolved, refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.unit.engine.books import CAP
from tests.unit.engine.world import World
from trainmedic.wire.envelope import Reply
from trainmedic_server import errors
from trainmedic_server.domain.run import Decision, Status
from trainmedic_server.engine import guards, preview
from trainmedic_server.engine.finding_alert_sender import IntakeAlertSender
from trainmedic_server.ports.limits import EngineLimits

MakeWorld = Callable[..., World]


async def test_a_new_alert_starts_a_run_and_a_repeat_does_not_act_again(world: MakeWorld) -> None:
    """The first report acts; the same alert reported again adds an event to the same item."""
    w = world(CAP)
    alert = w.alert(gpu="0", node="n1")
    first = await w.post(alert)
    again = await w.post(alert)
    assert [run.decision for run in first.runs] == [Decision.STARTED]
    assert again.duplicates == 1
    assert [(run.decision, run.run_id) for run in again.runs] == [(Decision.DUPLICATE, first.runs[0].run_id)]
    assert w.calls() == {"cap": 1}
    assert (await w.story()).count("alert_repeated") == 1


async def test_a_repeat_by_the_server_itself_does_not_act_again(world: MakeWorld) -> None:
    """Without Alertmanager, after the run has ended and a restart."""
    w = world(CAP.replace("Hot", "NodeSuspect"))
    alert = w.alert("NodeSuspect", gpu="0", node="n1")
    await IntakeAlertSender(w.engine.admit, w.clock).tell([alert])
    await w.pass_time(60)
    await w.restart(3000)
    await IntakeAlertSender(w.engine.admit, w.clock).tell([alert])
    await w.pass_time(60)
    assert len(await w.runs()) == 1
    assert w.calls() == {"cap": 1}
    assert (await w.story()).count("alert_repeated") == 1


async def test_the_same_alert_from_two_alertmanagers_at_once_starts_one_run(world: MakeWorld) -> None:
    """Deliveries that share a transaction see each other."""
    w = world(CAP)
    alert = w.alert(gpu="0", node="n1")
    one, other = await asyncio.gather(w.post(alert), w.post(alert))
    assert sorted([one.duplicates, other.duplicates]) == [0, 1]
    assert len(await w.runs()) == 1
    assert w.calls() == {"cap": 1}


async def test_a_firing_whose_resolved_came_first_is_stale_and_says_so(world: MakeWorld) -> None:
    """Deliveries can overtake each other: what has resolved does not fire again under the same beginning.

    Not acting has its reason in the history; once, however often the alert comes.
    """
    w = world(CAP)
    alert = w.alert(gpu="0", node="n1")
    await w.resolve(alert)
    first, second = await w.post(alert), await w.post(alert)
    assert (first.duplicates, second.duplicates) == (1, 1)
    assert [run.decision for run in first.runs] == [Decision.STALE]
    assert [(run.decision, run.run_id) for run in second.runs] == [(Decision.DUPLICATE, first.runs[0].run_id)]
    run = await w.run()
    assert (run.status, run.decision) == (Status.NOT_STARTED, Decision.STALE)
    assert "resolved before" in run.message
    assert w.calls() == {}


async def test_the_same_labels_firing_anew_start_a_new_run(world: MakeWorld) -> None:
    """Identity is fingerprint and beginning: a later beginning is another alert."""
    w = world(CAP)
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    await w.resolve(alert)
    await w.pass_time(60)
    await w.post(w.alert(gpu="0", node="n1"))
    assert w.calls() == {"cap": 2, "uncap": 1}


async def test_a_resolved_ends_older_beginnings_of_the_same_alert(world: MakeWorld) -> None:
    """A lost resolved does not hold an undo: only one beginning of an alert can fire at a time."""
    w = world(CAP)
    await w.post(w.alert(gpu="0", node="n1"))
    await w.pass_time(60)
    later = w.alert(gpu="0", node="n1")
    await w.post(later)
    await w.resolve(later)
    assert w.calls() == {"cap": 2, "uncap": 2}


async def test_another_alert_for_the_same_target_joins_the_open_run(world: MakeWorld) -> None:
    """At most one run is open per playbook and target; it has both alerts, and waits for both to resolve."""
    w = world(
        """
playbook: watch
on: {alert: [Hot, Hotter]}
target: node
steps:
  - {id: gone, wait_for: resolved}
"""
    )
    one, two = w.alert("Hot", node="n1"), w.alert("Hotter", node="n1")
    started = await w.post(one)
    joined = await w.post(two)
    assert [(run.decision, run.run_id) for run in joined.runs] == [(Decision.JOINED, started.runs[0].run_id)]
    await w.resolve(one)
    assert (await w.run()).status is Status.WAITING
    await w.resolve(two)
    assert (await w.run()).status is Status.SUCCEEDED


async def test_a_cooldown_holds_from_the_end_of_the_last_run(world: MakeWorld) -> None:
    """Within it nothing starts, and says so; the same alert reported after it starts a run."""
    w = world(CAP + "guards: {cooldown: 10m}\n")
    first = w.alert(gpu="0", node="n1")
    await w.post(first)
    await w.resolve(first)
    await w.pass_time(60)
    second = w.alert(gpu="0", node="n1")
    refused = await w.post(second)
    assert [run.decision for run in refused.runs] == [Decision.COOLDOWN]
    refused_again = await w.post(second)
    assert [(run.decision, run.run_id) for run in refused_again.runs] == [(Decision.COOLDOWN, refused.runs[0].run_id)]
    assert len(await w.runs()) == 2
    await w.pass_time(600)
    assert [run.decision for run in (await w.post(second)).runs] == [Decision.STARTED]
    assert w.calls()["cap"] == 2


async def test_a_rate_limit_counts_over_all_targets(world: MakeWorld) -> None:
    """In one delivery as over several."""
    w = world(CAP + "guards: {max_runs: {count: 2, per: 1h}}\n")
    admission = await w.post(*(w.alert(gpu=str(n), node="n1") for n in range(3)))
    assert [run.decision for run in admission.runs] == [Decision.STARTED, Decision.STARTED, Decision.RATE_LIMITED]
    await w.pass_time(3601)
    assert [run.decision for run in (await w.post(w.alert(gpu="7", node="n1"))).runs] == [Decision.STARTED]


async def test_a_rate_limit_may_count_each_target_alone(world: MakeWorld) -> None:
    """A noisy target uses up nothing of the others; in one delivery as over several."""
    w = world(CAP + "guards: {max_runs: {count: 1, per: 1h, per_target: true}}\n")
    first = w.alert(gpu="0", node="n1")
    admission = await w.post(first, w.alert(gpu="1", node="n1"))
    assert [run.decision for run in admission.runs] == [Decision.STARTED, Decision.STARTED]
    await w.resolve(first)
    await w.pass_time(60)
    admission = await w.post(w.alert(gpu="0", node="n1", again="yes"), w.alert(gpu="2", node="n1"))
    assert [run.decision for run in admission.runs] == [Decision.RATE_LIMITED, Decision.STARTED]
    assert "1 run on this target" in (admission.runs[0].why or "")


async def test_a_concurrency_limit_counts_open_runs(world: MakeWorld) -> None:
    """And makes room when one closes."""
    w = world(CAP + "guards: {max_concurrent: 1}\n")
    w.actions["cap"].outcomes.append("hang")
    admission = await w.post(w.alert(gpu="0", node="n1"), w.alert(gpu="1", node="n1"))
    assert [run.decision for run in admission.runs] == [Decision.STARTED, Decision.CONCURRENCY_LIMITED]


QUEUED = CAP.replace("with: {amount: 80}", "timeout: 1h") + "guards: {max_concurrent: 2, queue: 10m}\n"


async def test_runs_over_the_concurrency_limit_may_wait_for_their_turn(world: MakeWorld) -> None:
    """The sixth of six emergencies is not dropped: they act in order of arrival, also over a restart."""
    w = world(QUEUED)
    w.actions["cap"].outcomes.extend([timedelta(minutes=1)] * 6)
    admission = await w.post(*(w.alert(gpu=str(number), node="n1") for number in range(6)))
    assert {run.decision for run in admission.runs} == {Decision.STARTED}
    assert [run.waiting_on for run in await w.runs()] == [None, None, "turn", "turn", "turn", "turn"]
    assert w.calls()["cap"] == 2
    await w.restart()
    await w.pass_time(61)
    waiting = [run.target.gpu for run in await w.runs() if run.waiting_on == "turn" and run.target]
    assert waiting == ["4", "5"]
    assert [run.message for run in await w.runs() if run.status is Status.RUNNING] == ["", ""]
    await w.pass_time(121)
    assert {run.status for run in await w.runs()} == {Status.SUCCEEDED}


async def test_a_run_whose_turn_does_not_come_in_time_does_not_start(world: MakeWorld) -> None:
    """It ends as without a queue, and starts when the alert is reported again."""
    w = world(QUEUED)
    w.actions["cap"].outcomes.extend([timedelta(minutes=30)] * 2)
    alerts = [w.alert(gpu=str(number), node="n1") for number in range(3)]
    await w.post(*alerts)
    await w.pass_time(601)
    last = (await w.runs())[-1]
    assert (last.status, last.decision) == (Status.NOT_STARTED, Decision.CONCURRENCY_LIMITED)
    assert "waited 10m for its turn" in last.message


async def test_a_run_that_waits_for_its_turn_ends_with_its_alert(world: MakeWorld) -> None:
    """And gives its place to the next."""
    w = world(QUEUED)
    w.actions["cap"].outcomes.extend([timedelta(minutes=5)] * 2)
    alerts = [w.alert(gpu=str(number), node="n1") for number in range(4)]
    await w.post(*alerts)
    await w.resolve(alerts[2])
    assert (await w.runs())[2].status is Status.NOT_STARTED
    await w.pass_time(301)
    assert (await w.runs())[3].status is Status.SUCCEEDED


async def test_an_alert_that_began_long_ago_is_stale(world: MakeWorld) -> None:
    """Older than the maximum age: recorded, not acted on."""
    w = world(CAP)
    admission = await w.post(w.alert(gpu="0", node="n1", began_ago=901))
    assert [run.decision for run in admission.runs] == [Decision.STALE]
    run = await w.run()
    assert (run.status, run.success) == (Status.NOT_STARTED, None)
    assert w.calls() == {}


async def test_missing_or_contradicting_identity_is_refused_never_guessed(world: MakeWorld) -> None:
    """No GPU id does not mean GPU 0; two nodes do not mean the first."""
    w = world(CAP.replace('{gpu: "{{ labels.gpu }}", node: "{{ labels.node }}"}', "gpu"))
    unknown = await w.post(w.alert(node="n1"))
    ambiguous = await w.post(w.alert(gpu="0", node="n1", Hostname="n2"))
    assert [run.decision for run in unknown.runs] == [Decision.TARGET_UNKNOWN]
    assert [run.decision for run in ambiguous.runs] == [Decision.TARGET_AMBIGUOUS]
    assert "'n1'" in (await w.run(ambiguous.runs[0].run_id)).message
    assert w.calls() == {}


async def test_an_alert_that_no_playbook_reacts_to_is_counted_and_kept(world: MakeWorld) -> None:
    """Unmatched is part of the reply, and the alert is known afterwards."""
    w = world(CAP)
    alert = w.alert("Unheard")
    assert (await w.post(alert)).unmatched == 1
    assert (await w.post(alert)).duplicates == 1
    assert await w.runs() == []


async def test_while_paused_nothing_starts_and_a_repeat_after_resume_does(world: MakeWorld) -> None:
    """The kill switch."""
    w = world(CAP)
    await w.engine.pause("alice")
    alert = w.alert(gpu="0", node="n1")
    assert [run.decision for run in (await w.post(alert)).runs] == [Decision.PAUSED]
    await w.engine.resume("alice")
    assert w.calls() == {}
    assert [run.decision for run in (await w.post(alert)).runs] == [Decision.STARTED]


async def test_mode_observe_records_what_would_be_done_and_does_nothing(world: MakeWorld) -> None:
    """Each step has the parameters that it would have had; what depends on the run says so."""
    w = world(
        """
playbook: two-stage
on: {alert: Hot}
target: node
vars: {first: 80}
steps:
  - id: cap
    action: test.cap
    with: {amount: "{{ vars.first }}"}
  - {id: cooled, wait_for: resolved, timeout: 5m, on_timeout: continue}
  - id: harder
    when: steps.cooled.status == "timed_out"
    action: test.cap
    with: {amount: 60}
  - id: never
    when: labels.node == "n2"
    action: test.other
""",
        mode="observe",
    )
    admission = await w.post(w.alert(node="n1"))
    assert [run.decision for run in admission.runs] == [Decision.OBSERVE_ONLY]
    run = await w.run()
    assert run.status is Status.OBSERVED
    assert [(step.id, step.status.value, dict(step.params)) for step in run.steps[:4]] == [
        ("cap", "observed", {"amount": 80.0}),
        ("cooled", "observed", {}),
        ("harder", "observed", {"amount": 60.0}),
        ("never", "skipped", {}),
    ]
    assert "how the run goes" in (run.steps[2].message or "")
    assert run.action_taken == "test.cap, test.cap"
    assert run.message == "would have applied test.cap, and depending on the run test.cap"
    assert w.calls() == {}


async def test_the_breaker_opens_when_too_many_nodes_are_acted_on(world: MakeWorld) -> None:
    """New harm stops, undo does not, and only a person closes it; what it refused is not replayed."""
    w = world(CAP, breaker_min_nodes=2, breaker_share=0.5)
    alerts = [w.alert(gpu="0", node=f"n{n}") for n in range(6)]
    admission = await w.post(*alerts)
    assert [str(run.decision) for run in admission.runs] == ["started"] * 3 + ["breaker_open"] * 3
    await w.resolve(alerts[0])
    assert w.calls() == {"cap": 3, "uncap": 1}
    await w.restart()
    assert w.engine.controls.breaker_open
    await w.pass_time(1)
    assert [run.decision for run in (await w.post(w.alert(gpu="0", node="n0"))).runs] == [Decision.BREAKER_OPEN]
    await w.engine.close_breaker("alice")
    await w.pass_time(5)
    assert w.calls() == {"cap": 3, "uncap": 1}


@pytest.mark.parametrize("total", [1, 3, 7, 50, 100, 150])
def test_an_open_breaker_names_the_number_that_it_allows(total: int) -> None:
    """0.29 of 100 nodes are 29, although 0.29 * 100 is below it."""
    for percent in range(1, 101):
        limits = EngineLimits(breaker_min_nodes=0, breaker_share=percent / 100)
        first = next((n for n in range(total) if guards.why_breaker_opens_by_count(1, n, total, limits)), None)
        if first is not None:
            reason = guards.why_breaker_opens_by_count(1, first, total, limits)
            assert f"with 1 more it would be {first + 1}, and at most {first} may be" in str(reason)


async def test_the_breaker_counts_a_node_once(world: MakeWorld) -> None:
    """Many GPUs of one node are one node."""
    w = world(CAP, breaker_min_nodes=2, breaker_share=0.1)
    await w.post(*(w.alert(gpu=str(n), node="n1") for n in range(8)))
    assert w.calls() == {"cap": 8}
    assert not w.engine.controls.breaker_open


async def test_what_was_queued_for_a_target_does_not_act_once_the_breaker_is_open(world: MakeWorld) -> None:
    """New harm is new harm, however long ago it was admitted."""
    later = CAP.replace("playbook: cap", "playbook: later").replace("test.cap", "test.other")
    w = world(CAP, later.replace("    undo: on_resolve\n", ""), breaker_min_nodes=1, breaker_share=0.5)
    w.actions["cap"].outcomes.append(timedelta(seconds=10))
    await w.post(w.alert(gpu="0", node="n1"))
    await w.post(*(w.alert(gpu="0", node=f"n{n}") for n in range(2, 5)))
    assert w.engine.controls.breaker_open
    await w.pass_time(20)
    queued = next(run for run in await w.runs() if run.playbook == "later" and run.target and run.target.node == "n1")
    assert (queued.status, queued.decision) == (Status.NOT_STARTED, Decision.BREAKER_OPEN)
    assert not any(call.target.node == "n1" for call in w.actions["other"].calls)


async def test_a_reply_that_comes_too_late_is_on_record(world: MakeWorld) -> None:
    """The step stays unknown; whoever reads the history sees what the receiver said in the end."""
    w = world(CAP)
    w.actions["cap"].outcomes.append(errors.OutcomeUnknown("no reply"))
    await w.post(w.alert(gpu="0", node="n1"))
    command_id = w.actions["cap"].calls[0].command_id
    await w.engine.record_late_reply(Reply(command_id, "n1", "applied", output={"watts": 560}))
    await w.engine.record_late_reply(Reply("of no run", "n1", "applied"))
    record = await w.store.record((await w.run()).id)
    assert record is not None
    [late] = [event for event in record.events if event.kind == "late_reply"]
    assert (late.actor, late.data["status"], late.data["output"]) == ("n1", "applied", {"watts": 560})


def test_an_observed_run_names_steps_that_all_depend_on_the_run() -> None:
    assert preview._would_have_applied([("test.cap", True)]) == "would have applied test.cap, depending on the run"
