"""The alert map in the engine: applied once, before matching; what it does to identity, history and undo."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent

from tests.unit.catalog.test_alert_map import map_of
from tests.unit.engine.books import CAP
from tests.unit.engine.test_reactions import heard, unmatched
from tests.unit.engine.world import World
from trainmedic_core.target import Target
from trainmedic_server.domain.pause import PauseOrder, Scope
from trainmedic_server.domain.run import Decision, Status
from trainmedic_server.engine.admission_changes import ByHand
from trainmedic_server.engine.manual_runs import StartOrder
from trainmedic_server.ports.alert_map import NO_ALERT_MAP
from trainmedic_server.ports.received_alerts import ReceivedAlertFilter
from trainmedic_server.ports.store import HistoryFilter

MakeWorld = Callable[..., World]

RENAMES = "rename: [{alert: CardHot, as: Hot, labels: {gpu: '{{ labels.card }}'}, drop: [instance]}]"
NORTH = "accept: ['cluster=\"north\"']"
LOUD = dedent("""
    playbook: loud
    on: {alert: Loud}
    target: {gpu: "{{ labels.gpu }}", node: "{{ labels.node }}"}
    steps:
      - {action: test.look}
""")
LABELS = {"card": "6", "node": "rack9", "instance": "10.9.8.7:9400"}


async def test_a_renamed_alert_starts_the_playbook_of_its_new_name(world: MakeWorld) -> None:
    """The history has both names and both sets of labels, and the end of the original ends it."""
    w = world(CAP)
    w.alert_map = map_of(RENAMES)
    alert = w.alert("CardHot", **LABELS)
    admission = await w.post(alert)
    assert [(each.playbook, each.target, each.decision) for each in admission.runs] == [
        ("cap", "gpu:rack9/6", Decision.STARTED)
    ]
    run = await w.run()
    assert (run.alert_name, run.original_alert_name) == ("Hot", "CardHot")
    assert run.original_labels == alert.labels
    assert run.alert_labels == {"alertname": "Hot", "card": "6", "gpu": "6", "node": "rack9"}
    await w.resolve(alert)
    assert (await w.run()).status is Status.SUCCEEDED
    assert w.calls() == {"cap": 1, "uncap": 1}
    [record] = await heard(w)
    assert (record.alert.name, record.alert.original) == ("Hot", alert.labels)
    assert record.count == 2


async def test_runs_and_alerts_are_found_by_either_name(world: MakeWorld) -> None:
    """And alerts by a label that the map dropped."""
    w = world(CAP)
    w.alert_map = map_of(RENAMES)
    await w.post(w.alert("CardHot", **LABELS), w.alert("Hot", gpu="1", node="rack2"), w.alert("Other"))
    for name, count in (("CardHot", 1), ("Hot", 2), ("Other", 0)):
        page, _ = await w.store.page(HistoryFilter(alertname=name), 10, None)
        assert len(page) == count, name
    for name, count in (("CardHot", 1), ("Hot", 2), ("Other", 1)):
        alerts, _ = await w.store.alerts_page(ReceivedAlertFilter(alertname=name), 10, None)
        assert len(alerts) == count, name
    by_label, _ = await w.store.alerts_page(ReceivedAlertFilter(labels={"instance": LABELS["instance"]}), 10, None)
    assert [record.alert.name for record in by_label] == ["Hot"]
    several, _ = await w.store.page(HistoryFilter(alertname=["CardHot", "Hot"], playbook="cap"), 10, None)
    assert len(several) == 2


async def test_an_alert_that_is_not_accepted_is_recorded_and_never_acts(world: MakeWorld) -> None:
    """With the playbook that would have reacted, and without a target: its node is that of another cluster."""
    w = world(CAP)
    w.alert_map = map_of(RENAMES, NORTH)
    foreign = w.alert("CardHot", **LABELS, cluster="south")
    unknown = w.alert("Unheard", cluster="south")
    for _ in range(2):
        admission = await w.post(foreign, unknown)
    assert admission.unmatched == 1
    run = await w.run()
    assert (run.status, run.decision, run.target) == (Status.NOT_STARTED, Decision.NOT_ACCEPTED, None)
    assert run.message == "'cluster' is 'south' and must be 'north' (1.yaml)"
    assert w.calls() == {}
    by_name = {record.alert.name: record for record in await heard(w)}
    assert [(each.playbook, each.decision) for each in by_name["Hot"].reactions] == [("cap", "not_accepted")]
    assert [(each.playbook, each.decision) for each in by_name["Unheard"].reactions] == [("", "not_accepted")]
    assert not any(record.has_reaction for record in by_name.values())
    assert unmatched(w, "not_accepted") == 4


async def test_an_accepted_alert_acts_once_the_map_accepts_it(world: MakeWorld) -> None:
    """The next report of the same alert; the refusal passes."""
    w = world(CAP)
    w.alert_map = map_of(RENAMES, NORTH)
    alert = w.alert("CardHot", **LABELS)
    await w.post(alert)
    w.alert_map = map_of(RENAMES)
    await w.post(alert)
    assert [run.decision for run in await w.runs()] == [Decision.NOT_ACCEPTED, Decision.STARTED]


async def test_an_end_counts_whatever_the_map_says_by_then(world: MakeWorld) -> None:
    """An undo is never blocked: by another name, by none, or by a refusal; also over a restart."""
    for later in (NO_ALERT_MAP, map_of("rename: [{alert: CardHot, as: Loud}]"), map_of(NORTH)):
        w = world(CAP, LOUD)
        w.alert_map = map_of(RENAMES)
        alert = w.alert("CardHot", **LABELS)
        await w.post(alert)
        w.alert_map = later
        await w.stop_and_start()
        await w.post(alert)
        await w.resolve(alert)
        run = await w.run()
        assert run.status is Status.SUCCEEDED, later
        assert w.calls() == {"cap": 1, "uncap": 1}
        [record] = await heard(w)
        assert (record.alert.name, record.alert.original_name) == ("Hot", "CardHot")
        assert record.is_resolved


async def test_a_map_that_comes_later_takes_the_next_report(world: MakeWorld) -> None:
    """As a playbook does that is loaded later; what ended before stays under its own name."""
    w = world(CAP)
    alert, ended = w.alert("CardHot", **LABELS), w.alert("CardHot", **LABELS | {"card": "7"})
    await w.post(alert, ended)
    w.alert_map = map_of(RENAMES)
    await w.resolve(ended)
    await w.post(alert)
    assert (await w.run()).original_alert_name == "CardHot"
    await w.resolve(alert)
    assert (await w.run()).status is Status.SUCCEEDED


async def test_two_rules_of_one_thing_join_one_run(world: MakeWorld) -> None:
    """One renamed, one by its own name; the run ends with the later end."""
    w = world(CAP)
    w.alert_map = map_of(RENAMES)
    renamed, own = w.alert("CardHot", **LABELS), w.alert("Hot", gpu="6", node="rack9")
    admission = await w.post(renamed, own)
    assert [each.decision for each in admission.runs] == [Decision.STARTED, Decision.JOINED]
    await w.resolve(renamed)
    assert w.calls() == {"cap": 1}
    await w.resolve(own)
    assert w.calls() == {"cap": 1, "uncap": 1}


async def test_a_pause_holds_by_a_label_that_the_map_drops(world: MakeWorld) -> None:
    """People name what Alertmanager shows them."""
    w = world(CAP)
    w.alert_map = map_of(RENAMES)
    await w.engine.pause("ana", PauseOrder(Scope(labels={"instance": LABELS["instance"]})))
    await w.post(w.alert("CardHot", **LABELS))
    assert (await w.run()).decision is Decision.PAUSED


async def test_explaining_and_starting_by_hand_use_the_map(world: MakeWorld) -> None:
    """An alert that was heard before the map was there is found by its new name too."""
    w = world(CAP)
    alert = w.alert("CardHot", **LABELS)
    await w.post(alert)
    w.alert_map = map_of(RENAMES)
    [explained] = await w.engine.explain([alert])
    assert [(each.playbook, each.decision) for each in explained.playbooks] == [("cap", Decision.STARTED)]
    assert (explained.alert.name, explained.alert.original_name) == ("Hot", "CardHot")
    started = await w.engine.start_run(StartOrder("cap", Target.of_key("gpu:rack9/6")), ByHand("ana"))
    assert (started.run.alert, started.run.original_alert_name) == (alert.identity, "CardHot")
    [record] = await heard(w)
    assert record.alert.name == "Hot"
    w.alert_map = map_of(NORTH)
    [refused] = await w.engine.explain(
        [
            w.alert("Hot", gpu="0", node="n1"),
        ]
    )
    assert refused.refused == "'cluster' is '' and must be 'north' (0.yaml)"
    assert [each.decision for each in refused.playbooks] == [Decision.NOT_ACCEPTED]


async def test_own_alerts_pass_an_accept_that_they_cannot_meet(world: MakeWorld) -> None:
    """The alert of a finding has no label of a cluster, since no Prometheus adds one."""
    w = world(CAP)
    w.alert_map = map_of(NORTH)
    await w.post(w.alert("Hot", gpu="0", node="rack1", source="log"))
    assert (await w.run()).decision is Decision.STARTED
