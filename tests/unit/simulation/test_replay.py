"""Replaying recorded alerts: what is decided, and what the record does not tell."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.unit.catalog.test_alert_map import map_of
from tests.unit.simulation.recorded_world import catalog_of, moment, replayed
from trainmedic_server.catalog.library import StaticCatalog
from trainmedic_server.domain import inventory
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.domain.topology import Topology
from trainmedic_server.simulation.recorded import RecordedAlert, RecordedReaction, RecordedRun
from trainmedic_server.simulation.replay_result import ReplayResult, Unknown

CAP = """
playbook: cap
on: {alert: Hot}
target: node
guards: {cooldown: 10m}
steps:
  - {action: test.cap, with: {amount: 80}, timeout: 30s}
  - {wait_for: resolved, timeout: 5m}
"""
LONGEST = timedelta(minutes=5, seconds=30) + timedelta(minutes=15)
"""Of a run of CAP, with the time in which it must begin."""


def alert(at: float, node: str = "n1", *, until: float | None = None, count: int = 1, **members: Any) -> RecordedAlert:
    labels = members.pop("labels", {"alertname": "Hot", "node": node})
    end = moment(at if until is None else until)
    name = members.pop("fingerprint", f"{at}-{node}")
    return RecordedAlert(name, moment(at), moment(at), end, labels, count, **members)


def took(run_id: str, decision: str = "started", playbook: str = "cap") -> dict[str, Any]:
    return {"reactions": (RecordedReaction(playbook, decision, run_id),)}


def run(run_id: str, at: float, catalog: StaticCatalog, *, lasted: float | None = 60, **members: Any) -> RecordedRun:
    playbook = catalog.get("cap")
    assert playbook is not None
    given = {"mode": "enforce", "status": "succeeded", "decision": "started", "target": "node:n1"}
    given |= {"version": playbook.version, "duration_ms": None if lasted is None else int(lasted * 1000)}
    return RecordedRun(run_id=run_id, timestamp=moment(at), playbook="cap", **{**given, **members})


def now(result: ReplayResult, playbook: str = "cap") -> dict[str, int]:
    return dict(result.playbooks[playbook].now)


def test_a_new_playbook_starts_and_the_end_of_its_run_is_not_known() -> None:
    """A second alert on the node joins the run, or meets its cooldown; that it starts none is known. Later it does."""
    later = LONGEST.total_seconds() + 600
    result = replayed(catalog_of(CAP), [alert(0), alert(60), alert(later + 1), alert(0, "n2")])
    assert now(result) == {"started": 3, "joined or cooldown": 1}
    assert dict(result.playbooks["cap"].then) == {"none": 4}
    (first, second) = result.differences()
    assert (first.now, first.count, first.is_certain, first.unknown) == ("started", 3, True, None)
    assert (second.now, second.is_certain, second.unknown) == ("joined or cooldown", True, Unknown.EARLIER_RUN)


def test_between_the_first_and_the_last_possible_end_a_start_is_possible() -> None:
    """The cooldown of ten minutes may be over."""
    result = replayed(catalog_of(CAP), [alert(0), alert(900)])
    assert now(result) == {"started": 1, "started or joined or cooldown": 1}


def test_the_recorded_end_of_the_same_run_is_believed() -> None:
    """Same text, mode, target and alert: then the second alert met the cooldown, and a third started a run."""
    catalog = catalog_of(CAP)
    items = [
        alert(0, **took("r1")), alert(120, **took("r2", "cooldown")), alert(700, **took("r3")),
        run("r1", 0, catalog), run("r2", 120, catalog, lasted=0, status="not_started", decision="cooldown"),
        run("r3", 700, catalog),
    ]  # fmt: skip
    result = replayed(catalog, items)
    assert now(result) == {"started": 2, "cooldown": 1}
    assert (result.playbooks["cap"].same, result.differences()) == (3, [])


@pytest.mark.parametrize("changed", [{"version": "another"}, {"mode": "approve"}, {"target": "node:n9"}])
def test_the_end_of_another_run_is_not(changed: dict[str, str]) -> None:
    """Of another text, mode or target."""
    catalog = catalog_of(CAP)
    items = [alert(0, **took("r1")), alert(120), run("r1", 0, catalog, **changed)]
    assert now(replayed(catalog, items))["started"] == (2 if "target" in changed else 1)


def test_in_mode_observe_nothing_is_open() -> None:
    """A run that only observes ends at once, so every decision is known."""
    result = replayed(catalog_of(CAP), [alert(0), alert(60), alert(601)], Mode.OBSERVE)
    assert now(result) == {"observe_only": 2, "cooldown": 1}
    assert result.playbooks["cap"].now_time.at_most == timedelta()


def test_reports_at_unknown_times_may_start_a_run_after_the_cooldown() -> None:
    """An alert that fires for an hour was refused at first; it was reported twice more, nobody knows when. After 15
    minutes it is stale.
    """
    catalog = catalog_of(CAP)
    first = [alert(0, **took("r1")), run("r1", 0, catalog)]
    still = alert(70, until=3600, count=3, fingerprint="still")
    assert now(replayed(catalog, [*first, still])) == {"started": 1, "started or joined or cooldown or stale": 1}
    (found,) = (each for each in replayed(catalog, [*first, still]).differences() if each.unknown)
    assert (found.unknown, found.fingerprint) == (Unknown.REPORTS, "still")
    short = alert(70, until=500, count=3)
    assert now(replayed(catalog, [*first, short])) == {"started": 1, "cooldown": 1}
    only_its_end = alert(70, until=3600, count=2, resolved_at=moment(3600))
    assert now(replayed(catalog, [*first, only_its_end])) == {"started": 1, "cooldown": 1}


def test_a_run_that_started_on_a_later_report_starts_by_then() -> None:
    """The report on which it was decided is recorded."""
    catalog = catalog_of(CAP)
    items = [
        alert(0, **took("r1")), run("r1", 0, catalog),
        alert(70, until=3600, count=9, fingerprint="still", **took("r2")), run("r2", 800, catalog),
    ]  # fmt: skip
    assert now(replayed(catalog, items)) == {"started": 2}


def test_a_target_that_only_the_server_knew_is_not_known() -> None:
    """Its run is none on another target, but may count in the limit of all."""
    address = {"labels": {"alertname": "Hot", "instance": "10.0.0.7:9100"}}
    limited = catalog_of(CAP.replace("{cooldown: 10m}", "{max_runs: {count: 1, per: 1h}}"))
    result = replayed(limited, [alert(0, **address), alert(60)])
    assert now(result) == {"not_known": 1, "started or rate_limited": 1}
    (unknown,) = (each for each in result.differences() if each.now == "not_known")
    assert unknown.unknown is Unknown.TARGET
    assert "10.0.0.7" in unknown.why
    known = Topology(inventory.parse({"10.0.0.7": "n7"}))
    assert now(replayed(limited, [alert(0, **address)], topology=known)) == {"started": 1}


def test_a_recorded_target_serves_where_the_labels_name_none() -> None:
    """Of the same kind, also with another text of the playbook."""
    address = {"labels": {"alertname": "Hot", "instance": "10.0.0.7:9100"}}
    catalog = catalog_of(CAP)
    items = [alert(0, **address, **took("r1")), run("r1", 0, catalog, version="another", target="node:n7")]
    assert now(replayed(catalog, items)) == {"started": 1}
    items = [alert(0, **address, **took("r1")), run("r1", 0, catalog, version="another", target="job:llm")]
    assert now(replayed(catalog, items)) == {"not_known": 1}
    unfound = run("r1", 0, catalog, lasted=0, target=None, status="not_started", decision="target_unknown")
    items = [alert(0, **address, **took("r1", "target_unknown")), unfound]
    assert now(replayed(catalog, items)) == {"target_unknown": 1}


def test_a_pause_of_then_holds_now() -> None:
    """Operators made it, not the playbooks."""
    catalog = catalog_of(CAP)
    held = run("r1", 0, catalog, lasted=0, status="not_started", decision="paused", version="another")
    assert now(replayed(catalog, [alert(0, **took("r1", "paused")), held])) == {"paused": 1}


def test_an_old_alert_is_stale() -> None:
    """By the maximum age of the server."""
    old = RecordedAlert("f", moment(-3600), moment(0), moment(0), {"alertname": "Hot", "node": "n1"}, 1)
    assert now(replayed(catalog_of(CAP), [old])) == {"stale": 1}


def test_an_alert_that_was_over_when_first_reported_starts_nothing() -> None:
    """As in the server."""
    result = replayed(catalog_of(CAP), [alert(0, resolved_at=moment(0))])
    assert (result.ended_at_first, result.playbooks) == (1, {})


def test_the_breaker_may_open_unless_the_number_of_nodes_is_known() -> None:
    """Eleven nodes within ten minutes: of eleven known ones too many, of a hundred not."""
    alerts = [alert(number, f"n{number}") for number in range(12)]
    result = replayed(catalog_of(CAP), alerts)
    assert now(result) == {"started": 10, "started or breaker_open": 2}
    assert [at for at, _ in result.breaker_opened] == [moment(10)]
    assert result.differences()[-1].unknown is Unknown.BREAKER
    assert now(replayed(catalog_of(CAP), alerts, nodes=100)) == {"started": 12}
    after = [*alerts, alert(3700, "n50")]
    assert now(replayed(catalog_of(CAP), after)) == {"started": 11, "started or breaker_open": 2}


def test_a_playbook_that_is_gone_or_no_longer_matches_is_a_difference() -> None:
    """With the reason."""
    narrow = catalog_of(CAP.replace("{alert: Hot}", "{alert: Hot, matchers: ['severity=\"critical\"']}"))
    items = [alert(0, **took("r1")), alert(1, **took("r2", playbook="old"))]
    gone, unmatched = replayed(narrow, items).differences()[::-1]
    assert (unmatched.playbook, unmatched.then, unmatched.now) == ("cap", "started", "not_matched")
    assert "severity" in unmatched.why
    assert (gone.playbook, gone.now, gone.why) == ("old", "not_matched", "no such playbook is replayed")


def test_runs_that_people_started_are_taken_as_they_were() -> None:
    """Their stand-in for an alert is none; their run occupies its target."""
    catalog = catalog_of(CAP)
    by_hand = alert(0, fingerprint="by-hand-1", **took("r1"))
    items = [by_hand, run("r1", 0, catalog, lasted=600, started_by="ann"), alert(60)]
    result = replayed(catalog, items)
    assert (result.alerts, result.by_hand, result.given_runs) == (1, 1, 1)
    assert now(result) == {"joined": 1}


def test_the_alert_map_renames_and_refuses() -> None:
    """From the labels that were sent."""
    alert_map = map_of("accept: ['site=\"east\"']\nrename: [{alert: HostHot, as: Hot}]\n")
    labels = {"alertname": "HostHot", "node": "n1", "site": "east"}
    items = [alert(0, labels=labels), alert(1, labels={**labels, "site": "west"}), alert(2, labels=labels)]
    result = replayed(catalog_of(CAP), items, alert_map=alert_map)
    assert now(result) == {"started": 1, "not_accepted": 1, "joined or cooldown": 1}
    assert replayed(catalog_of(CAP), items).without_playbook == 3


def test_gpu_hours_are_a_range_where_an_end_is_not_known() -> None:
    """Recorded runs have one; the number of GPUs of a job is that of the nodes that it touched."""
    catalog = catalog_of(CAP)
    items = [alert(0, **took("r1")), run("r1", 0, catalog, lasted=1800), alert(0, "n2")]
    result = replayed(catalog, items, gpus_per_node=8)
    then, after = result.playbooks["cap"].then_time, result.playbooks["cap"].now_time
    assert then.as_data() == {"at_least": 4.0, "at_most": 4.0, "runs_of_unknown_size": 0}
    assert after.at_most is not None
    assert abs(after.at_least - timedelta(hours=4)) < timedelta(seconds=1)
    assert abs(after.at_most - timedelta(hours=4) - 8 * LONGEST) < timedelta(seconds=1)
    assert replayed(catalog, items).playbooks["cap"].now_time.uncounted_runs == 2
    on_job = run("r1", 0, catalog, lasted=1800, target="job:llm", touched=("n1", "n2"))
    then = replayed(catalog, [alert(0), on_job], gpus_per_node=8).playbooks["cap"].then_time
    assert then.as_data()["at_least"] == 8.0


def test_copies_of_an_alert_are_one() -> None:
    """Two exports of one history; the newer one counts."""
    result = replayed(catalog_of(CAP), [alert(0), alert(0, until=60, count=2)])
    assert now(result) == {"started": 1}


def test_only_alerts_first_heard_since_then_are_replayed() -> None:
    """Runs from before are taken as recorded."""
    catalog = catalog_of(CAP)
    items = [alert(0, **took("r1")), run("r1", 0, catalog, lasted=30), alert(300)]
    result = replayed(catalog, items, since=moment(100))
    assert (result.alerts, result.given_runs, now(result)) == (1, 1, {"cooldown": 1})


def test_an_empty_record_has_an_empty_result() -> None:
    """No division, no time."""
    result = replayed(catalog_of(CAP), [])
    assert (result.first, result.as_data(10)["playbooks"]) == (None, [])
