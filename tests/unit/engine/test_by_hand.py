"""Runs that a person starts or tries again: by the same guards, and on record as such."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.unit.engine.books import CAP
from tests.unit.engine.world import Source, World
from trainmedic_core.target import Target, TargetKind
from trainmedic_server import errors
from trainmedic_server.domain.run import Decision, Event, OrderKind, Status
from trainmedic_server.engine.admission_changes import ByHand
from trainmedic_server.engine.manual_runs import Started, StartOrder
from trainmedic_server.ports.received_alerts import ReceivedAlertFilter

MakeWorld = Callable[..., World]

NODE = Target(TargetKind.NODE, node="n1")
WAITING = """
playbook: waiting
on: {alert: Hot}
target: node
guards: {cooldown: 10m}
steps:
  - {id: cap, action: test.cap, with: {amount: "{{ labels.watts | default(100) | int }}"}, undo: on_resolve}
  - {id: cooled, wait_for: resolved, timeout: 5m}
  - {id: other, action: test.other}
"""


async def start(w: World, playbook: str = "waiting", target: Target = NODE, **order: Any) -> Started:
    key = order.pop("key", None)
    started = await w.engine.start_run(StartOrder(playbook, target, **order), ByHand("ann", "do it", key=key))
    await w.pass_time(0)
    return started


async def events(w: World, run_id: str, kind: str) -> list[Event]:
    record = await w.store.record(run_id)
    assert record is not None
    return [event for event in record.events if event.kind == kind]


async def test_a_run_by_hand_is_tied_to_an_alert_that_proves_too_little(world: MakeWorld) -> None:
    """Who starts it answers for that; and the alert's end is the end of the cause."""
    w = world(WAITING.replace("{alert: Hot}", "{alert: Hot, proof: shipped_rule}"))
    alert = w.alert(node="n1", watts="250")
    assert (await w.post(alert)).runs == ()
    run = await w.run((await start(w)).run.id)
    assert (run.status, run.waiting_on, run.alert_name) == (Status.WAITING, "resolved", "Hot")
    await w.resolve(alert)
    assert (await w.run(run.id)).status is Status.SUCCEEDED


async def test_a_run_by_hand_is_tied_to_the_alert_that_fires_for_it(world: MakeWorld) -> None:
    """However old that is; its end gives back what was changed. Who wanted the run is on record."""
    w = world(WAITING)
    old = w.alert(node="n1", watts="250", began_ago=7200)
    await w.post(old)
    assert (await w.run()).decision is Decision.STALE
    started = await start(w)
    run = await w.run(started.run.id)
    assert (run.status, run.waiting_on, run.started_by, run.alert_name) == (Status.WAITING, "resolved", "ann", "Hot")
    assert w.actions["cap"].calls[0].params.model_dump() == {"amount": 250}
    (begun,) = await events(w, run.id, "started")
    assert (begun.actor, begun.data["by_hand"], begun.data["note"]) == ("ann", True, "do it")
    await w.resolve(old)
    assert w.calls() == {"cap": 1, "other": 1, "uncap": 1}


async def test_without_an_alert_a_run_waits_for_none_and_gives_back_when_a_person_says_so(world: MakeWorld) -> None:
    """The Alertmanager, which never heard of it, is not asked."""
    w = world(WAITING, source=Source())
    await w.restart()
    started = await start(w, labels={"watts": "300"})
    run = await w.run(started.run.id)
    assert (run.status, run.alert_name, run.step(("steps", 1)).status) == (Status.SUCCEEDED, "StartedByHand", "skipped")
    await w.pass_time(3600)
    assert w.calls() == {"cap": 1, "other": 1}
    await w.engine.order(run.id, OrderKind.UNDO, "ann")
    await w.pass_time(0)
    assert w.calls() == {"cap": 1, "other": 1, "uncap": 1}


async def test_what_a_run_by_hand_has_changed_is_given_back_after_a_long_time_at_the_latest(world: MakeWorld) -> None:
    """As with an alert whose end was lost."""
    w = world(WAITING, assume_resolved_after=timedelta(hours=2))
    await w.restart()
    await start(w)
    await w.pass_time(3 * 3600)
    assert w.calls()["uncap"] == 1


async def test_the_guards_hold_for_people_too_and_the_decision_is_on_record(world: MakeWorld) -> None:
    """A pause, a cooldown, a run that is open."""
    w = world(WAITING)
    await w.engine.pause("bob")
    held = await start(w)
    assert (held.run.decision, held.run.status, held.run.message) == (
        Decision.PAUSED,
        Status.NOT_STARTED,
        "paused by bob",
    )
    assert (await w.run(held.run.id)).started_by == "ann"
    await w.engine.resume("bob")
    await start(w)
    assert (await start(w)).run.decision is Decision.COOLDOWN
    assert w.calls() == {"cap": 1, "other": 1}


async def test_a_second_run_beside_an_open_one_is_refused(world: MakeWorld) -> None:
    """It is named."""
    w = world(WAITING)
    await w.post(w.alert(node="n1"))
    with pytest.raises(errors.Conflict, match=r"run .* of waiting on node:n1 is open"):
        await start(w)
    with pytest.raises(errors.Conflict, match="waiting works on a node, not on job:llm"):
        await start(w, target=Target(TargetKind.JOB, job="llm"))
    with pytest.raises(errors.NotFound, match="no playbook nothing is loaded"):
        await start(w, "nothing")


async def test_a_dry_run_says_what_would_be_done_and_does_and_records_nothing(world: MakeWorld) -> None:
    """And what bars it."""
    w = world(WAITING)
    would = await start(w, dry_run=True, labels={"watts": "300"})
    assert [(step.action, step.params) for step in would.steps] == [
        ("test.cap", {"amount": 300.0}),
        ("test.other", {"amount": 1.0}),
    ]
    assert would.run.decision is Decision.STARTED
    await w.engine.pause("bob")
    assert (await start(w, dry_run=True)).run.decision is Decision.PAUSED
    assert (await w.runs(), w.calls()) == ([], {})


async def test_a_request_that_is_repeated_starts_nothing_again(world: MakeWorld) -> None:
    """The client did not hear the answer; over a restart too."""
    w = world(WAITING)
    first = await start(w, key="k1")
    await w.restart()
    second = await start(w, key="k1")
    assert (second.is_repeated, second.run.id) == (True, first.run.id)
    assert w.calls()["cap"] == 1


async def test_a_repeated_request_does_not_wait_for_its_own_run(world: MakeWorld) -> None:
    """The run that it has started has the target."""
    w = world(WAITING)
    w.actions["cap"].outcomes.append(timedelta(seconds=20))
    first, second = await start(w, key="k1"), await start(w, key="k1")
    assert (second.is_repeated, second.run.id, second.waits_for) == (True, first.run.id, None)


async def test_what_stands_in_for_an_alert_is_listed_with_what_it_led_to(world: MakeWorld) -> None:
    """It is none of the alerts that nothing reacts to."""
    w = world(WAITING)
    started = await start(w)
    (heard,), _ = await w.store.alerts_page(ReceivedAlertFilter(reacted=True), 9, None)
    (reaction,) = heard.reactions
    assert (heard.alert.name, reaction.playbook, reaction.run_id) == ("StartedByHand", "waiting", started.run.id)


async def test_a_key_names_one_request_of_one_person(world: MakeWorld) -> None:
    """Whoever takes the same one for something else hears that it was not started."""
    w = world(WAITING)
    first = await start(w, key="k1")
    with pytest.raises(errors.Conflict, match="'k1' was used for another request"):
        await start(w, target=Target(TargetKind.NODE, node="n2"), key="k1")
    with pytest.raises(errors.Conflict, match=f"which has started run {first.run.id}"):
        await w.engine.retry(first.run.id, ByHand("ann", repeats=first.run.id, key="k1"))
    assert len(await w.runs()) == 1


@pytest.mark.parametrize("is_firing", [False, True])
async def test_a_key_with_other_labels_names_another_request(world: MakeWorld, is_firing: bool) -> None:
    """They decide the values of steps, and which alert it is for. An alert that fires has both labels here."""
    w = world(WAITING)
    if is_firing:
        await w.post(w.alert(node="n1", watts="300", rack="r1"))
        await w.engine.order((await w.run()).id, OrderKind.CANCEL, "bob")
        await w.pass_time(0)
    first = await start(w, key="k1", labels={"watts": "300"})
    assert first.run.alert_name == ("Hot" if is_firing else "StartedByHand")
    for labels in ({"watts": "200"}, {"rack": "r1"}, {"watts": "300", "rack": "r1"}, {}):
        with pytest.raises(errors.Conflict, match=f"another request, which .* run {first.run.id}"):
            await start(w, key="k1", labels=labels)
    await w.restart()
    again = await start(w, key="k1", labels={"watts": "300"})
    assert (again.is_repeated, again.run.id) == (True, first.run.id)


async def test_a_key_of_a_refused_request_names_its_target_too(world: MakeWorld) -> None:
    """The record of a refusal has no target; another target is another request all the same."""
    w = world(WAITING, inventory={"10.4.0.2": "rack-2"})
    stranger = Target(TargetKind.NODE, node="stranger")
    first = await start(w, target=stranger, key="k1")
    assert first.run.decision is Decision.TARGET_UNKNOWN
    for other in ("another", "rack-2"):
        with pytest.raises(errors.Conflict, match="'k1' was used for another request"):
            await start(w, target=Target(TargetKind.NODE, node=other), key="k1")
    w.inventory["stranger"] = "rack-9"
    again = await start(w, target=stranger, key="k1")
    assert (again.is_repeated, again.run.id) == (True, first.run.id)


async def test_what_has_failed_is_tried_again_while_its_alert_fires(world: MakeWorld) -> None:
    """However old; the new run names the one that it repeats, and the other way round."""
    w = world(CAP, max_age=timedelta(minutes=15))
    w.actions["cap"].outcomes.append(errors.PermanentFailure("no agent"))
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    failed = await w.run()
    assert failed.status is Status.FAILED
    await w.pass_time(7200)
    await w.engine.retry(failed.id, ByHand("ann", "the agent is back", repeats=failed.id))
    await w.pass_time(0)
    again = (await w.runs())[-1]
    assert (again.status, again.repeats, again.started_by) == (Status.SUCCEEDED, failed.id, "ann")
    assert [event.data["run_id"] for event in await events(w, failed.id, "retried")] == [again.id]
    with pytest.raises(errors.Conflict, match="has succeeded"):
        await w.engine.retry(again.id, ByHand("ann", repeats=again.id))
    await w.resolve(alert)
    assert w.calls() == {"cap": 2, "uncap": 1}
    with pytest.raises(errors.Conflict, match="has resolved; start the playbook again"):
        await w.engine.retry(failed.id, ByHand("ann", repeats=failed.id))
    with pytest.raises(errors.NotFound):
        await w.engine.retry("nothing", ByHand("ann"))


async def test_a_run_by_hand_that_waits_for_its_target_does_not_go_stale_by_its_alert(world: MakeWorld) -> None:
    """Its age counts from when a person wanted it, over a restart too."""
    w = world(CAP, CAP.replace("playbook: cap", "playbook: slow").replace("Hot", "Slow"), max_age=timedelta(minutes=15))
    await w.post(w.alert(gpu="0", node="n1", began_ago=7200))
    w.actions["cap"].outcomes.append(timedelta(seconds=20))
    await w.post(w.alert("Slow", gpu="0", node="n1"))
    started = await start(w, "cap", Target(TargetKind.GPU, node="n1", gpu="0"))
    assert (await w.run(started.run.id)).waiting_on == "target"
    assert started.waits_for is not None
    await w.pass_time(30)
    assert (await w.run(started.run.id)).status is Status.SUCCEEDED


async def test_an_alert_that_joins_a_run_by_hand_ends_what_it_has_changed(world: MakeWorld) -> None:
    """What stands in for an alert would keep it for a day; over a restart too."""
    w = world(WAITING.replace("action: test.other", "action: test.other, retry: {attempts: 9, delay: 1h}"))
    w.actions["other"].outcomes.append(errors.TemporaryFailure("not now"))
    started = await start(w)
    alert = w.alert(node="n1")
    await w.post(alert)
    assert [event.data["alert"] for event in await events(w, started.run.id, "joined")] == ["Hot"]
    await w.pass_time(3700)
    assert (await w.run(started.run.id)).status is Status.SUCCEEDED
    await w.restart()
    assert "uncap" not in w.calls()
    await w.resolve(alert)
    assert w.calls()["uncap"] == 1
