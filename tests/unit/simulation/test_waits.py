"""Playbook tests of waits, in virtual time, with the real actions' names and parameters."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from trainmedic_server.actions import registry
from trainmedic_server.api import given_alerts
from trainmedic_server.catalog.library import Library
from trainmedic_server.domain.run import Decision
from trainmedic_server.engine.explanation import alone
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.simulation import suite

PLAYBOOK = """\
playbook: idle-first
on: {alert: GPURecoveryNeeded}
target: node
only_during: {schedule: 0 0 * * *, duration: 4h}
steps:
  - id: quiet
    wait_for: {query: 'max(busy{node="{{ target.node }}"}) < 30', for: 5m, every: 30s}
    timeout: 1h
  - id: fit
    wait_for: {action: node.facts, until: output.memory.percent < 50, every: 1m}
    timeout: 20m
    on_timeout: continue
  - {when: steps.fit.status == "succeeded", action: k8s.cordon}
  - {wait: 10m}
  - {action: notify, with: {message: "busy {{ steps.quiet.output.value }}"}}
"""
ALERT = "alerts: [{alert: {labels: {alertname: GPURecoveryNeeded, node: n1}}}]"


def run(tmp_path: Path, test: str) -> list[str]:
    (tmp_path / "p.yaml").write_text(PLAYBOOK)
    body = "\n".join(f"    {line}" for line in f"{ALERT}\n{test}".splitlines())
    (tmp_path / "p_test.yaml").write_text(f"tests:\n  - name: t\n{body}\n")
    result = suite.run_file(tmp_path / "p_test.yaml", registry.specs_only())
    return [str(each) for each in (*result.problems, *(fault for each in result.results for fault in each.failures))]


def test_waits_pass_in_virtual_time(tmp_path: Path) -> None:
    """Replies give the values that a query compares; looks are no calls."""
    test = """\
replies:
  quiet: [{applied: {value: 42}}, {failed: no answer}, {applied: {value: 12}}]
  fit: [{applied: {memory: {percent: 70}}}, {applied: {memory: {percent: 20}}}]
expect:
  - at: 3m
    runs: [{status: waiting, message: busy, steps: {quiet: waiting}}]
    calls: []
  - runs:
      - status: succeeded
        steps: {quiet: {status: succeeded, output: {value: 12}, attempts: 0}, fit: succeeded}
        events: [wait_started, wait_changed, wait_changed, wait_ended, wait_started]
    calls: [k8s.cordon, {action: notify, params: {message: busy 12}}]
"""
    assert run(tmp_path, test) == []


@pytest.mark.parametrize(("reply", "status"), [("{applied: {value: 30}}", "timed_out"), ("applied", "succeeded")])
def test_a_query_without_a_fitting_value_does_not_hold(tmp_path: Path, reply: str, status: str) -> None:
    """By default it has a sample."""
    test = f"replies: {{quiet: {reply}, fit: {{failed: no}}}}\nexpect: {{runs: [{{steps: {{quiet: {status}}}}}]}}"
    assert run(tmp_path, test) == []


def test_explain_shows_waits_and_windows(tmp_path: Path) -> None:
    """With the query as it would be asked: no label can leave its quotes."""
    (tmp_path / "p.yaml").write_text(PLAYBOOK.replace("target.node", "labels.rack"))
    actions = registry.specs_only()
    library = Library([tmp_path], actions)
    library.reload()
    alert = {"labels": {"alertname": "GPURecoveryNeeded", "node": "n1", "rack": 'a"b'}}
    now = datetime(2026, 1, 1, 5, tzinfo=UTC)
    (explained,) = alone(lambda _: library.all(), given_alerts.read(alert, now), actions, EngineLimits(), now)
    (reaction,) = explained.playbooks
    assert reaction.decision is Decision.OUTSIDE_WINDOW
    assert reaction.guards == ("only_during: 4h from each 0 0 * * * (UTC)",)
    quiet, fit, _, pause, _ = reaction.steps
    assert quiet.params == {"query": 'max(busy{node="a\\u0022b"}) < 30'}
    assert quiet.what == "wait_for query to hold for 5m, every 30s, at most 1h"
    assert (fit.what, pause.what) == ("wait_for action node.facts, every 1m, at most 20m", "wait 10m")
