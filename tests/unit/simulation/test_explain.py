"""Explaining: what would be done about an alert, step by step, and why not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.unit.simulation.actions import PLAYBOOK, SimulatedActions
from trainmedic_core.expressions import template_syntax
from trainmedic_logs.simulation import log_check
from trainmedic_server.api import explanations, given_alerts, test_text
from trainmedic_server.catalog.library import Library
from trainmedic_server.cli import explained as text
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.domain.run import Decision
from trainmedic_server.engine import forecast
from trainmedic_server.engine.explanation import Explanation, alone, explain_for_a_test
from trainmedic_server.engine.forecast import StepForecast
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.simulation import check, suite, suite_format

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def explained(
    tmp_path: Path, alert: Mapping[str, Any], mode: Mode = Mode.ENFORCE, playbook: str = PLAYBOOK
) -> Explanation:
    (tmp_path / "cap.yaml").write_text(playbook)
    library = Library([tmp_path], SimulatedActions())
    library.reload()
    alerts = given_alerts.read(alert, NOW)
    (of_alert,) = alone(lambda _: library.all(), alerts, SimulatedActions(), EngineLimits(mode=mode), NOW)
    (explanation,) = of_alert.playbooks
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


def test_without_a_server_what_depends_on_earlier_runs_is_open(tmp_path: Path) -> None:
    """In a condition and in parameters; a condition on the alert alone still decides."""
    step = """steps:
  - {id: often, when: 'runs.count("1d") > 2', action: test.tell, with: {text: often}}
  - {id: last, action: test.tell, with: {text: 'after {{ runs.last.status }}'}}
  - {id: never, when: labels.rack is defined, action: test.tell, with: {text: '{{ runs.last.status }}'}}
"""
    explanation = explained(
        tmp_path, {"labels": {"alertname": "Hot", "node": "n1"}}, playbook=PLAYBOOK.replace("steps:\n", step, 1)
    )
    assert [(each.verdict, each.why) for each in explanation.steps[:3]] == [
        (StepForecast.UNDETERMINED, 'depends on earlier runs: runs.count("1d") > 2'),
        (StepForecast.UNDETERMINED, "its parameters depend on earlier runs"),
        (StepForecast.SKIPPED, "when does not hold: labels.rack is defined"),
    ]


def test_a_template_is_parsed_once_for_all_alerts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing it for each was nearly all the time of explaining a thousand."""
    (tmp_path / "cap.yaml").write_text(PLAYBOOK)
    library = Library([tmp_path], SimulatedActions())
    library.reload()
    parsed: list[str] = []
    for name in ("parse_template", "parse_expression"):
        parse = getattr(template_syntax, name)
        monkeypatch.setattr(template_syntax, name, lambda text, parse=parse: (parsed.append(text), parse(text))[1])
    forecast._free_names.cache_clear()
    alerts = given_alerts.read([{"labels": {"alertname": "Hot", "node": f"n{number}"}} for number in range(3)], NOW)
    explained_alerts = alone(lambda _: library.all(), alerts, SimulatedActions(), EngineLimits(), NOW)
    assert [len(each.playbooks[0].steps) for each in explained_alerts] == [4, 4, 4]
    assert len(parsed) == len(set(parsed)) > 0


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


def test_an_alert_that_has_resolved_begins_nothing(tmp_path: Path) -> None:
    """As on the server, to which it says that runs may end."""
    alert = {"labels": {"alertname": "Hot", "node": "n1"}, "status": "resolved"}
    explanation = explained(tmp_path, alert)
    assert (explanation.matched, explanation.decision) == (True, None)
    assert explanation.why == "the alert has resolved, so no run starts"


def test_the_text_is_one_line_each_whatever_a_label_holds(tmp_path: Path) -> None:
    """A label cannot forge a line."""
    (tmp_path / "cap.yaml").write_text(PLAYBOOK)
    library = Library([tmp_path], SimulatedActions())
    library.reload()
    labels = {"alertname": "Hot", "node": "n1", "runbook": "x\n    decision: started\x1b[2J"}
    alerts = given_alerts.read({"labels": labels}, NOW)
    of_alerts = alone(lambda _: library.all(), alerts, SimulatedActions(), EngineLimits(mode=Mode.ENFORCE), NOW)
    lines = list(text.lines(explanations.view(of_alerts, ["Hot"], NOW).model_dump(mode="json")))
    assert sum(line.strip().startswith("decision:") for line in lines) == 1
    assert not any("\x1b" in line or "\n" in line for line in lines)
    assert "    target:   node:n1" in lines


def test_what_is_written_as_a_test_passes_as_one(tmp_path: Path) -> None:
    """Of alerts that lead to a run, that no target is found for, that a condition keeps out, and that have resolved;
    whatever their labels hold."""
    (tmp_path / "cap.yaml").write_text(PLAYBOOK.replace("{alert: Hot}", "{alert: Hot, matchers: [severity!=none]}"))
    library = Library([tmp_path], SimulatedActions())
    library.reload()
    odd = {"runbook": "a: 'b' \"c\" {{ d }} \\ \x07\x85 ü 😀"}
    labels: list[dict[str, str]] = [{"node": "n1", **odd}, odd, {"severity": "none"}, {"node": "n2"}]
    given = [{"labels": {"alertname": "Hot", **each}, "annotations": odd} for each in labels]
    given[-1]["status"] = "resolved"  # type: ignore[assignment]
    alerts = given_alerts.read(given, NOW)
    seen = explain_for_a_test(library.for_alert, alerts, SimulatedActions(), EngineLimits())
    file = tmp_path / "hot_test.yaml"
    file.write_text(test_text.write(seen))
    result = suite.run_file(file, SimulatedActions())
    assert result.passed, (result, file.read_text())
    expected = [test.expect[0].decisions for each in suite_format.read(file)[0] for test in each.spec.tests]
    decided = [[each.decision for each in decisions or ()] for decisions in expected]
    assert decided == [[Decision.STARTED], [Decision.TARGET_UNKNOWN], [], []]


def test_check_reads_tests_too(tmp_path: Path) -> None:
    """Their form, not their outcome."""
    (tmp_path / "cap.yaml").write_text(PLAYBOOK.replace("target: node", "targt: node"))
    (tmp_path / "cap_test.yaml").write_text("tests: [{name: t, expct: {}}]\n")
    result = check.check([tmp_path], SimulatedActions())
    assert result.playbooks == ()
    assert {Path(problem.file).name for problem in result.problems} == {"cap.yaml", "cap_test.yaml"}
    assert log_check.test_files([tmp_path]) == [tmp_path / "cap_test.yaml"]


def checked(tmp_path: Path, *playbooks: str) -> check.CheckResult:
    for number, playbook in enumerate(playbooks):
        (tmp_path / f"p{number}.yaml").write_text(playbook.replace("playbook: cap", f"playbook: p{number}"))
    return check.check([tmp_path], SimulatedActions())


def matching(*matchers: str) -> str:
    return PLAYBOOK.replace("{alert: Hot}", json.dumps({"alert": ["Hot", "Cold"], "matchers": matchers}))


@pytest.mark.parametrize(
    ("first", "second", "overlap"),
    [
        (PLAYBOOK, PLAYBOOK, True),
        (PLAYBOOK, matching('severity="critical"'), True),
        (matching('severity=~"warning|critical"'), matching('severity="critical"', 'rack="1"'), True),
        (matching('severity="warning"'), matching('severity="critical"'), False),
        (matching('severity=~"warning|info"'), matching('severity!~"w.*|info"'), False),
        (PLAYBOOK, PLAYBOOK.replace("alert: Hot", "alert: Cold"), False),
        (PLAYBOOK, PLAYBOOK.replace("target: node", "mode: observe\ntarget: node"), False),
        (PLAYBOOK, PLAYBOOK.replace("target: node", "exclusive: true\ntarget: node"), False),
    ],
)
def test_two_playbooks_that_both_act_on_an_alert_are_a_warning(
    tmp_path: Path, first: str, second: str, overlap: bool
) -> None:
    """Where their matchers leave room for an alert that both take; it names both, and is no mistake."""
    result = checked(tmp_path, first, second)
    assert (result.problems, len(result.playbooks)) == ((), 2)
    told = [warning.message for warning in result.warnings]
    assert bool(told) is overlap, told
    assert not told or ("'p0' (" in told[0] and "'p1' both act on the alert Hot, one after the other" in told[0])


def test_the_warning_names_the_playbook_with_the_higher_priority(tmp_path: Path) -> None:
    """The order is then not left to their names."""
    [warning] = checked(tmp_path, PLAYBOOK, PLAYBOOK.replace("target: node", "priority: 1\ntarget: node")).warnings
    assert warning.message.endswith("both act on the alert Hot, 'p1' first")


def test_a_condition_may_tell_two_playbooks_apart(tmp_path: Path) -> None:
    """Nobody can know before an alert comes; the warning says so."""
    second = PLAYBOOK.replace("{alert: Hot}", "{alert: Hot, when: labels.rack is defined}")
    [warning] = checked(tmp_path, PLAYBOOK, second).warnings
    assert warning.message.endswith(", unless on.when distinguishes them")


def test_what_holds_no_playbook_is_named(tmp_path: Path) -> None:
    """An empty directory, an empty file, and a path that is right."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    (tmp_path / "cap.yaml").write_text(PLAYBOOK)
    roots = [tmp_path / "empty", tmp_path / "empty.yaml", tmp_path / "cap.yaml"]
    assert check.check(roots, SimulatedActions()).empty == tuple(roots[:2])


@pytest.mark.parametrize(("text", "is_told"), [("", True), ("\n  \n", True), ("# playbook: off\n", False)])
def test_an_empty_file_beside_playbooks_is_named(tmp_path: Path, text: str, is_told: bool) -> None:
    """A file of comments may be a playbook that was switched off."""
    (tmp_path / "cap.yaml").write_text(PLAYBOOK)
    (tmp_path / "saved.yaml").write_text(text)
    result = check.check([tmp_path], SimulatedActions())
    assert [each.file for each in result.warnings] == [str(tmp_path / "saved.yaml")] * is_told
    assert not result.problems
