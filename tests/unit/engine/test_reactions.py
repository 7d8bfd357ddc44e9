"""What is kept of each alert: what the playbooks made of it, and why."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent

from msgspec.structs import replace
from structlog.testing import capture_logs

from tests.unit.engine.books import CAP
from tests.unit.engine.world import World
from trainmedic_server.domain.alert import AlertRecord
from trainmedic_server.domain.reaction import Reaction
from trainmedic_server.ports.received_alerts import ReceivedAlertFilter

MakeWorld = Callable[..., World]

PICKY = dedent("""
    playbook: picky
    on:
      alert: Hot
      matchers: ['severity=~"warning|critical"']
      when: labels.heat | int > 80
    target: gpu
    steps:
      - {action: test.look}
""")


async def heard(w: World) -> list[AlertRecord]:
    """Every alert that was heard, newest first."""
    page, _ = await w.store.alerts_page(ReceivedAlertFilter(), 100, None)
    return page


def unmatched(w: World, kept_by: str) -> float:
    return w.metrics.registry.get_sample_value("trainmedic_unmatched_alerts_total", {"kept_by": kept_by}) or 0.0


async def test_an_alert_that_no_playbook_names_is_kept_and_counted(world: MakeWorld) -> None:
    """Each report of it; as resolved it is no missed chance."""
    w = world(CAP)
    alert = w.alert("TrainingLossSpikes", job_name="llm-1")
    await w.post(alert)
    await w.post(alert)
    await w.resolve(alert)
    [record] = await heard(w)
    assert (record.alert.name, record.count, record.reactions) == ("TrainingLossSpikes", 3, ())
    assert record.is_resolved
    assert unmatched(w, "alertname") == 2


async def test_the_first_condition_that_does_not_hold_is_the_reason(world: MakeWorld) -> None:
    """A matcher before ``when``; what cannot be evaluated is told apart."""
    w = world(PICKY)
    labels = {"gpu": "0", "node": "n1"}
    await w.post(w.alert(**labels), w.alert(**labels, severity="info", heat="99"))
    await w.post(w.alert(**labels, severity="warning", heat="70"), w.alert(**labels, severity="warning"))
    reasons = [each.reactions for each in sorted(await heard(w), key=lambda each: len(each.alert.labels))]
    assert [(each.decision, each.run_id) for (each,) in reasons] == [
        ("not_matched", None), ("match_failed", None), ("not_matched", None), ("not_matched", None),
    ]  # fmt: skip
    assert reasons[0][0].reason == "'severity' is '' and must match warning|critical"
    assert (unmatched(w, "conditions"), unmatched(w, "failure")) == (3, 1)


async def test_a_run_stays_with_the_alert_that_led_to_it(world: MakeWorld) -> None:
    """A repeat does not turn ``started`` into ``duplicate``; nor does the end of the alert."""
    w = world(CAP)
    alert = w.alert(gpu="0", node="n1")
    first = await w.post(alert)
    started = (Reaction("cap", "started", "", first.runs[0].run_id),)
    await w.post(alert)
    await w.resolve(alert)
    [record] = await heard(w)
    assert (record.reactions, record.count, record.has_reaction) == (started, 3, True)
    assert unmatched(w, "alertname") == 0


async def test_what_kept_a_run_back_is_replaced_once_it_starts(world: MakeWorld) -> None:
    """Paused at the first report, started at the next."""
    w = world(CAP)
    alert = w.alert(gpu="0", node="n1")
    await w.engine.pause("ann")
    await w.post(alert)
    [paused] = (await heard(w))[0].reactions
    assert (paused.decision, paused.reason) == ("paused", "paused by ann")
    await w.engine.resume("ann")
    again = await w.post(alert)
    [started] = (await heard(w))[0].reactions
    assert (started.decision, started.run_id) == ("started", again.runs[0].run_id)


async def test_an_alert_without_a_target_met_a_playbook_and_no_run(world: MakeWorld) -> None:
    """The reason is that of the history's item; the alert counts as one that nobody could decide on."""
    w = world(CAP)
    made = await w.post(w.alert(gpu="0"))
    [record] = await heard(w)
    [reaction] = record.reactions
    assert (reaction.decision, reaction.run_id) == ("target_unknown", made.runs[0].run_id)
    assert "node" in reaction.reason
    assert (record.has_reaction, unmatched(w, "target")) == (False, 1)


async def test_an_alert_first_heard_of_as_resolved_says_why_nothing_began(world: MakeWorld) -> None:
    """And if its firing comes late, why nothing begins then."""
    w = world(CAP)
    alert = w.alert(gpu="0", node="n1")
    await w.resolve(alert)
    [reaction] = (await heard(w))[0].reactions
    assert (reaction.decision, reaction.run_id) == ("resolved", None)
    late = await w.post(replace(alert, ends_at=None))
    [reaction] = (await heard(w))[0].reactions
    assert (reaction.decision, reaction.run_id) == ("stale", late.runs[0].run_id)


PROVEN = dedent("""
    playbook: proven
    on: {alert: Hot, when: labels.gpu != "7", proof: [shipped_rule, hardware_xid]}
    target: gpu
    steps:
      - {action: test.look}
""")


async def test_an_alert_that_proves_too_little_is_its_own_decision(world: MakeWorld) -> None:
    """Told apart from a condition that does not hold, which comes first; and it begins nothing."""
    w = world(PROVEN)
    labels = {"gpu": "0", "node": "n1"}
    await w.post(w.alert(**labels, err_code="31"))
    await w.post(w.alert(gpu="7", node="n1", err_code="31"))
    await w.post(w.alert(**labels, err_code="95"))
    proven, elsewhere, unproven = await heard(w)
    (reaction,) = unproven.reactions
    assert (reaction.decision, reaction.run_id, unproven.has_reaction) == ("no_proof", None, False)
    assert '(err_code="31" is an error of the program)' in reaction.reason
    assert [each.decision for each in elsewhere.reactions] == ["not_matched"]
    assert [each.decision for each in proven.reactions] == ["started"]


async def test_what_is_refused_for_want_of_proof_is_logged_with_what_to_do(world: MakeWorld) -> None:
    """Once, and again each hour: an alert that fires is delivered again and again. Its end is no news."""
    w = world(PROVEN)
    alert = replace(w.alert(gpu="0", node="n1"), annotations={"runbook_url": "docs/how-to/monitoring.md#hot"})
    with capture_logs() as logs:
        for _ in range(3):
            await w.post(alert)
        await w.resolve(alert)
    (told,) = [entry for entry in logs if entry["event"] == "alert lacks required proof"]
    assert (told["playbook"], told["alert"]) == ("proven", "Hot")
    assert "deploy the rules of this release" in told["why"]
    await w.pass_time(3600)
    with capture_logs() as logs:
        await w.post(w.alert(gpu="1", node="n1"))
    assert "alert lacks required proof" in [entry["event"] for entry in logs]
