"""Playbook tests and explanations of playbooks that begin without an alert."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from trainmedic_server.actions import registry
from trainmedic_server.api import explanations, given_alerts
from trainmedic_server.catalog.library import Library
from trainmedic_server.cli import explained as text
from trainmedic_server.engine.explanation import alone
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.simulation import suite

NIGHTLY = """\
playbook: nightly
on: {schedule: "0 3 * * *", timezone: Europe/Berlin}
target: {node: n1}
steps:
  - {action: notify, with: {message: "check of {{ target.node }}"}}
"""


def failures(tmp_path: Path, playbook: str, test: str) -> list[str]:
    (tmp_path / "p.yaml").write_text(playbook)
    body = "\n".join(f"    {line}" for line in test.splitlines())
    (tmp_path / "p_test.yaml").write_text(f"tests:\n  - name: t\n{body}\n")
    result = suite.run_file(tmp_path / "p_test.yaml", registry.specs_only())
    return [str(each) for each in (*result.problems, *(fault for each in result.results for fault in each.failures))]


def test_a_schedule_is_started_by_an_order_or_by_its_time(tmp_path: Path) -> None:
    """A test begins on 2026-01-01 at midnight, UTC."""
    test = """\
orders: [{at: 1m, do: schedule, playbook: nightly}]
end: 2h
expect:
  - at: 1m
    runs: [{playbook: nightly, target: "node:n1", status: succeeded}]
  - decisions: [started, started]
    runs: [{status: succeeded}, {status: succeeded}]
    calls: [{action: notify, params: {message: check of n1}}, notify]
"""
    assert failures(tmp_path, NIGHTLY, test) == []


def test_an_order_for_a_playbook_without_a_schedule_fails(tmp_path: Path) -> None:
    """As any refused order."""
    test = "orders: [{do: schedule, playbook: nightly}]\nexpect: {runs: []}"
    (failure,) = failures(tmp_path, NIGHTLY.replace('schedule: "0 3 * * *", timezone: Europe/Berlin', "alert: A"), test)
    assert "no playbook nightly with a schedule" in failure


def test_explain_shows_the_next_times(tmp_path: Path) -> None:
    """And what the run would do."""
    (tmp_path / "p.yaml").write_text(NIGHTLY)
    library = Library([tmp_path], registry.specs_only())
    library.reload()
    now = datetime(2026, 3, 28, 12, tzinfo=UTC)
    answers = alone(
        lambda _: library.all(),
        given_alerts.read({"schedule": "nightly"}, now),
        registry.specs_only(),
        EngineLimits(),
        now,
    )
    lines = list(text.lines(explanations.view(answers, {}, now).model_dump(mode="json")))
    assert "    target:   node:n1" in lines
    (times,) = (line for line in lines if "schedule:" in line and "next" in line)
    assert "next at 2026-03-29T01:00:00Z, 2026-03-30T01:00:00Z" in times, "on the 29th 02:00 becomes 03:00 in Berlin"


CHAIN = """\
playbook: cap
on: {alert: Hot}
target: node
steps:
  - {action: node.facts}
---
playbook: after
on: {run: {playbook: cap, status: failed}}
target: node
steps:
  - {action: notify, with: {message: "{{ ended_run.message }} on {{ ended_run.node }}, {{ labels.rack }}"}}
"""


def test_a_chain_is_followed_in_a_test(tmp_path: Path) -> None:
    """To its end, without an order for it."""
    test = """\
alerts: [{alert: {labels: {alertname: Hot, node: n1, rack: r1}}}]
replies: {node.facts: {rejected: no agent}}
expect:
  decisions: [started, started]
  runs: [{playbook: cap, status: failed}, {playbook: after, status: succeeded}]
  calls: [node.facts, {action: notify, params: {message: "step step-1: no agent on n1, r1"}}]
"""
    assert failures(tmp_path, CHAIN, test) == []


def test_playbooks_that_start_each_other_are_not_tested(tmp_path: Path) -> None:
    """They could run for ever."""
    found = failures(tmp_path, CHAIN.replace("{alert: Hot}", "{run: {playbook: after, status: failed}}"), "expect: {}")
    assert any("start each other without end" in each for each in found)


PULLED = """\
playbook: pulled
on: {event: rack, when: labels.rack != "r9"}
target: {node: "{{ labels.rack }}-1"}
steps:
  - {action: notify, with: {message: "{{ labels.event }} on {{ target.node }}"}}
"""


def test_an_event_is_sent_in_a_test(tmp_path: Path) -> None:
    """With its labels; the same event again within an hour is a repetition."""
    test = """\
orders:
  - {do: event, event: rack, labels: {rack: r1}}
  - {do: event, event: rack, labels: {rack: r9}}
  - {at: 1m, do: event, event: rack, labels: {rack: r1}}
expect:
  decisions: [started, duplicate]
  runs: [{target: "node:r1-1", status: succeeded}]
  calls: [{action: notify, params: {message: rack on r1-1}}]
"""
    assert failures(tmp_path, PULLED, test) == []


def test_explain_shows_what_an_event_would_start(tmp_path: Path) -> None:
    """By its labels, as the alert map makes them."""
    (tmp_path / "p.yaml").write_text(PULLED)
    library = Library([tmp_path], registry.specs_only())
    library.reload()
    now = datetime(2026, 3, 28, 12, tzinfo=UTC)
    document = {"event": "rack", "labels": {"rack": "r1"}}
    (alert,) = alone(
        lambda _: library.all(), given_alerts.read(document, now), registry.specs_only(), EngineLimits(), now
    )
    (explanation,) = alert.playbooks
    assert (explanation.matched, explanation.target, given_alerts.kept_back(document)) == (True, "node:r1-1", ())


AGAIN = """\
playbook: again
on: {alert: Hot}
target: node
guards: {again: {after: 10m, times: 1}}
steps:
  - {action: node.facts}
"""


def test_further_runs_are_decisions_too(tmp_path: Path) -> None:
    """In the order of time, next to those on alerts."""
    test = """\
alerts:
  - {alert: {labels: {alertname: Hot, node: n1}}}
  - {at: 20m, alert: {labels: {alertname: Hot, node: n2}}}
end: 40m
expect:
  - {at: 5m, decisions: [started]}
  - {at: 15m, decisions: [started, {target: "node:n1", decision: started}]}
  - decisions:
      - {target: "node:n1", decision: started}
      - {target: "node:n1", decision: started}
      - {target: "node:n2", decision: started}
      - {target: "node:n2", decision: started}
"""
    assert failures(tmp_path, AGAIN, test) == []


def test_an_ended_run_starts_another_while_lines_are_read(tmp_path: Path) -> None:
    """Not only at the end of the test."""
    test = """\
lines: [{source: training, text: all is well}]
alerts: [{at: 1m, alert: {labels: {alertname: Hot, node: n1, rack: r1}}}]
replies: {node.facts: {rejected: no agent, after: 20s}}
expect:
  - {at: 30m, runs: [{playbook: cap, status: failed}, {playbook: after, status: succeeded}]}
end: 1h
"""
    assert failures(tmp_path, CHAIN, test) == []
