"""Explaining: what would be done about an alert, step by step, and why not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.unit.simulation.actions import PLAYBOOK, SimulatedActions
from trainmedic_server import errors
from trainmedic_server.catalog.library import Library
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.domain.run import Decision
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.simulation import check, explain, report
from trainmedic_server.simulation.explain import Explanation, StepForecast

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def explained(
    tmp_path: Path, alert: Mapping[str, Any], mode: Mode = Mode.ENFORCE, playbook: str = PLAYBOOK
) -> Explanation:
    (tmp_path / "cap.yaml").write_text(playbook)
    library = Library([tmp_path], SimulatedActions())
    library.reload()
    alerts = explain.read_alerts(json.dumps(alert).encode(), NOW)
    (explanation,) = explain.explain(library, SimulatedActions(), alerts, EngineLimits(mode=mode), NOW)
    return explanation


def test_steps_run_are_skipped_or_depend_on_what_is_not_known_yet(tmp_path: Path) -> None:
    """Rendered parameters are shown where they are known."""
    playbook = PLAYBOOK.replace(
        "steps:\n", "steps:\n  - {id: ask, approve: 'touch {{ target.node }}?', when: labels.rack is defined}\n", 1
    )
    explanation = explained(tmp_path, {"labels": {"alertname": "Hot", "node": "n1", "runbook": "r"}}, playbook=playbook)
    assert (explanation.matched, explanation.target, explanation.decision) == (True, "node:n1", Decision.STARTED)
    verdicts = {step.id: step.verdict for step in explanation.steps}
    assert verdicts == {
        "ask": StepForecast.SKIPPED,
        "cap": StepForecast.RUNS,
        "cooled": StepForecast.RUNS,
        "harder": StepForecast.UNDETERMINED,
        "failure-1": StepForecast.RUNS,
    }
    assert explanation.steps[1].params == {"amount": 80.0}
    assert explanation.steps[1].undo == "on_resolve"
    assert explanation.steps[4].params == {"text": "n1 is still hot, see r"}
    assert explanation.guards == ("cooldown: not within 10m after its last run on this target ended",)


def test_a_step_that_would_fail_says_why(tmp_path: Path) -> None:
    """Here a label that the alert lacks."""
    explanation = explained(tmp_path, {"labels": {"alertname": "Hot", "node": "n1"}})
    assert explanation.steps[-1].verdict is StepForecast.FAILS
    assert "there is no 'runbook' here" in explanation.steps[-1].why


@pytest.mark.parametrize(
    ("alert", "mode", "decision", "reason"),
    [
        ({"labels": {"alertname": "Hot", "node": "n1"}}, Mode.OBSERVE, Decision.OBSERVE_ONLY, ""),
        ({"labels": {"alertname": "Hot"}}, Mode.ENFORCE, Decision.TARGET_UNKNOWN, "no label names the node"),
        (
            {"labels": {"alertname": "Hot", "node": "a", "nodename": "b"}},
            Mode.ENFORCE,
            Decision.TARGET_AMBIGUOUS,
            "disagree",
        ),
        (
            {"labels": {"alertname": "Hot", "node": "n1"}, "startsAt": (NOW - timedelta(hours=1)).isoformat()},
            Mode.ENFORCE,
            Decision.STALE,
            "began 1h ago",
        ),
    ],
)
def test_the_decision_is_the_engines_own(
    tmp_path: Path, alert: Mapping[str, Any], mode: Mode, decision: Decision, reason: str
) -> None:
    """As far as the alert alone tells."""
    explanation = explained(tmp_path, alert, mode)
    assert explanation.decision is decision
    assert reason in explanation.why


def test_a_playbook_that_does_not_react_says_which_condition_failed(tmp_path: Path) -> None:
    """With the values."""
    explanation = explained(
        tmp_path,
        {"labels": {"alertname": "Hot", "node": "n1", "severity": "info"}},
        playbook=PLAYBOOK.replace("{alert: Hot}", "{alert: Hot, matchers: ['severity=~\"warning|critical\"']}"),
    )
    assert not explanation.matched
    assert explanation.why == "'severity' is 'info' and must match warning|critical"


def test_a_delivery_is_read_as_the_webhook_reads_it() -> None:
    """Every alert in it; what is neither a delivery nor an alert is refused."""
    body = {
        "version": "4",
        "alerts": [
            {"status": "resolved", "labels": {"alertname": "A"}, "startsAt": "2026-01-01T00:00:00Z"},
            {"status": "firing", "labels": {"alertname": "B"}, "startsAt": "2026-01-01T00:00:00Z"},
        ],
    }
    assert [alert.name for alert in explain.read_alerts(json.dumps(body).encode(), NOW)] == ["A", "B"]
    for wrong in (b"{", b"[]", b'{"alertname": "A"}', b'{"labels": {"a": 1}}'):
        with pytest.raises(errors.PayloadError):
            explain.read_alerts(wrong, NOW)


def test_the_text_is_one_line_each_whatever_a_label_holds(tmp_path: Path) -> None:
    """A label cannot forge a line."""
    explanation = explained(
        tmp_path, {"labels": {"alertname": "Hot", "node": "n1", "runbook": "x\n    decision: started\x1b[2J"}}
    )
    lines = list(report.explanations([explanation]))
    assert sum(line.strip().startswith("decision:") for line in lines) == 1
    assert not any("\x1b" in line or "\n" in line for line in lines)
    assert "    target:   node:n1" in lines


def test_check_reads_tests_too(tmp_path: Path) -> None:
    """Their form, not their outcome."""
    (tmp_path / "cap.yaml").write_text(PLAYBOOK.replace("target: node", "targt: node"))
    (tmp_path / "cap_test.yaml").write_text("tests: [{name: t, expct: {}}]\n")
    result = check.check([tmp_path], SimulatedActions())
    assert result.playbooks == ()
    assert {Path(problem.file).name for problem in result.problems} == {"cap.yaml", "cap_test.yaml"}
    assert check.test_files([tmp_path]) == [tmp_path / "cap_test.yaml"]
