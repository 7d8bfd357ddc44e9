"""What the server says that it would do about an alert; and that it does nothing."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from tests.unit.engine.books import CAP
from tests.unit.engine.test_reactions import PICKY
from tests.unit.engine.world import World
from trainmedic_server.api.explanations import view
from trainmedic_server.cli import explained as explained_text
from trainmedic_server.domain.alert import Alert
from trainmedic_server.domain.pause import PauseOrder, Scope
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.domain.run import Decision
from trainmedic_server.engine.explanation import ExplainedAlert, Explanation
from trainmedic_server.ports.received_alerts import ReceivedAlertFilter

MakeWorld = Callable[..., World]

COOLING = CAP.replace("playbook: cap", "playbook: cooling").replace("target:", "guards: {cooldown: 10m}\ntarget:", 1)
STAYS = CAP.rstrip() + "\n  - {id: over, wait_for: resolved, timeout: 1h}\n"
OTHER = STAYS.replace("playbook: cap", "playbook: other")


async def explained(w: World, *alerts: Alert) -> tuple[ExplainedAlert, ...]:
    return await w.engine.explain(alerts)


async def judged(w: World, alert: Alert) -> Explanation:
    [of_alert] = await explained(w, alert)
    [explanation] = of_alert.playbooks
    return explanation


async def test_nothing_is_changed_by_explaining(world: MakeWorld) -> None:
    """No run, no alert, no event; and the alert is as new as before when it comes."""
    w = world(CAP)
    alert = w.alert(gpu="0", node="n1")
    await w.post(w.alert(gpu="9", node="n9"))
    before = await w.store.last_seq()
    explanation = await judged(w, alert)
    assert (explanation.decision, explanation.run_id, explanation.target) == (Decision.STARTED, None, "gpu:n1/0")
    assert [step.params for step in explanation.steps if step.what == "action test.cap"] == [{"amount": 80.0}]
    assert (len(await w.runs()), await w.store.last_seq(), w.calls()) == (1, before, {"cap": 1})
    assert len((await w.store.alerts_page(ReceivedAlertFilter(), 9, None))[0]) == 1
    assert [run.decision for run in (await w.post(alert)).runs] == [Decision.STARTED]


async def test_the_run_that_deals_with_an_alert_is_named(world: MakeWorld) -> None:
    """The very alert, or another one for the same target."""
    w = world(STAYS)
    alert = w.alert(gpu="0", node="n1")
    made = await w.post(alert)
    run_id = made.runs[0].run_id
    again = await judged(w, alert)
    assert (again.decision, again.run_id) == (Decision.DUPLICATE, run_id)
    assert run_id in again.why
    joins = await judged(w, w.alert(gpu="0", node="n1", severity="critical"))
    assert (joins.decision, joins.run_id) == (Decision.JOINED, run_id)


async def test_switches_and_guards_are_those_of_this_moment(world: MakeWorld) -> None:
    """A pause, and a cooldown with what is left of it."""
    w = world(COOLING)
    alert = w.alert(gpu="0", node="n1")
    await w.post(alert)
    await w.resolve(alert)
    await w.pass_time(60)
    anew = w.alert(gpu="0", node="n1")
    cooling = await judged(w, anew)
    assert cooling.decision is Decision.COOLDOWN
    assert cooling.guards == ("cooldown: not within 10m after its last run on this target ended; 9m left",)
    await w.engine.pause("ann")
    assert (await judged(w, anew)).why == "paused by ann"
    await w.engine.resume("ann")
    await w.pass_time(600)
    assert (await judged(w, anew)).mode is Mode.ENFORCE
    await w.engine.pause("ann", PauseOrder(Scope(playbook="cooling"), observe=True))
    assert (await judged(w, anew)).mode is Mode.OBSERVE


async def test_two_playbooks_that_would_both_act_are_named(world: MakeWorld) -> None:
    """The second waits for the first, and then acts as well."""
    w = world(STAYS, OTHER)
    [of_alert] = await explained(w, w.alert(gpu="0", node="n1"))
    assert of_alert.acting == ("cap", "other")
    await w.post(w.alert(gpu="0", node="n1", severity="info"))
    [later] = await explained(w, w.alert("Hot", gpu="0", node="n1"))
    assert {each.decision for each in later.playbooks} == {Decision.JOINED}


async def test_whoever_holds_the_target_is_named(world: MakeWorld) -> None:
    """Its run would have to end first."""
    w = world(STAYS, PICKY.replace("test.look", "test.cap"))
    made = await w.post(w.alert(gpu="0", node="n1"))
    alert = w.alert(gpu="0", node="n1", severity="warning", heat="99")
    [of_alert] = await explained(w, alert)
    picky = next(each for each in of_alert.playbooks if each.playbook == "picky")
    assert (picky.decision, picky.waits_for) == (Decision.STARTED, made.runs[0].run_id)


async def test_a_gpu_that_may_be_another_is_not_said_to_be_held(world: MakeWorld) -> None:
    """No agent reports whether the index and the UUID are one GPU."""
    w = world(STAYS, PICKY.replace("test.look", "test.cap"))
    made = await w.post(w.alert(gpu="0", node="n1"))
    [of_alert] = await explained(w, w.alert(gpu="GPU-a", node="n1", severity="warning", heat="99"))
    answer = view([of_alert], {}, w.clock.now()).model_dump(mode="json")
    text = list(explained_text.lines(answer))
    assert f"    waits:    for run {made.runs[0].run_id}, whose lock excludes it" in text
    assert not any("holds" in line or "locks" in line for line in text)


async def test_a_run_that_changes_nothing_waits_for_no_other(world: MakeWorld) -> None:
    """Nor does another wait for it: a message about a GPU says something while that GPU is kept cool."""
    w = world(STAYS, PICKY.rstrip() + "\n  - {wait_for: resolved, timeout: 1h}\n")
    made = await w.post(w.alert(gpu="0", node="n1"))
    [of_alert] = await explained(w, w.alert(gpu="0", node="n1", severity="warning", heat="99"))
    picky = next(each for each in of_alert.playbooks if each.playbook == "picky")
    assert (picky.decision, picky.waits_for) == (Decision.STARTED, None)
    both = await w.post(w.alert(gpu="0", node="n1", severity="warning", heat="98"))
    await w.pass_time(5)
    looks, caps = [await w.run(run.run_id) for run in (both.runs[-1], made.runs[0])]
    assert {looks.waiting_on, caps.waiting_on} == {"resolved"}


async def test_an_alert_that_has_resolved_tells_its_runs_and_begins_none(world: MakeWorld) -> None:
    """As the webhook would."""
    w = world(STAYS)
    alert = w.alert(gpu="0", node="n1")
    made = await w.post(alert)
    resolved = Alert(
        alert.fingerprint, type(alert.status)("resolved"), alert.labels, {}, alert.starts_at, w.clock.now()
    )
    [of_alert] = await explained(w, resolved)
    assert of_alert.told == (made.runs[0].run_id,)
    assert [(each.decision, each.matched) for each in of_alert.playbooks] == [(None, True)]
    assert (await w.run()).is_open


async def test_an_old_alert_can_be_judged_as_of_then(world: MakeWorld) -> None:
    """Its age, that is."""
    w = world(CAP)
    alert = w.alert(gpu="0", node="n1", began_ago=86400)
    assert (await judged(w, alert)).decision is Decision.STALE
    [of_alert] = await w.engine.explain([alert], alert.starts_at + timedelta(minutes=1))
    assert of_alert.playbooks[0].decision is Decision.STARTED


async def test_each_alert_meets_the_playbooks_for_its_name_alone(world: MakeWorld) -> None:
    """In a delivery of several; the first condition that does not hold is told."""
    w = world(CAP, PICKY.replace("alert: Hot", "alert: Cold"))
    hot, cold, none = await explained(w, w.alert(gpu="0", node="n1"), w.alert("Cold"), w.alert("Warm"))
    assert [each.playbook for each in hot.playbooks] == ["cap"]
    [picky] = cold.playbooks
    assert (picky.matched, picky.why) == (False, "'severity' is '' and must match warning|critical")
    assert none.playbooks == ()
