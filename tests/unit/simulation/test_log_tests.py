"""Tests of log rules: from lines through findings and alerts to what playbooks do, in virtual time."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

from pathlib import Path

import pytest

from trainmedic_logs.simulation import log_suite
from trainmedic_logs.simulation.test_results import FileResult
from trainmedic_server.actions import registry
from trainmedic_server.simulation import suite

SHIPPED = sorted((Path(__file__).parents[3] / "logs/trainmedic_logs/logrules").glob("*_test.yaml"))
RULE = """
log_rule: oom
source: training
contains: ["out of memory"]
match: ['out of memory on GPU (?P<gpu>\\d+)']
role: root
cause: gpu_memory
alert: {name: OutOfMemory, labels: {device: "{{ fields.gpu }}"}, until: 1m}
---
playbook: tell
on: {alert: OutOfMemory}
target: job
steps: [{action: notify, with: {message: "{{ annotations.ranks }}"}}]
"""


def run(folder: Path, tests: str, rules: str = RULE) -> FileResult:
    (folder / "a.yaml").write_text(rules)
    (folder / "a_test.yaml").write_text(tests)
    return suite.run_file(folder / "a_test.yaml", registry.specs_only())


def complaints(result: FileResult) -> list[str]:
    told = [*result.problems, *(failure for test in result.results for failure in test.failures)]
    return [f"{problem.line}:{problem.column}: {problem.message}" for problem in told]


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_the_tests_of_the_shipped_rules_pass(path: Path) -> None:
    """Each file that stands beside them."""
    result = suite.run_file(path, registry.specs_only())
    assert complaints(result) == []
    assert result.results


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_they_pass_without_a_server_too(path: Path) -> None:
    """What playbooks do is left out, and said so."""
    result = log_suite.run_file(path)
    assert complaints(result) == []
    assert [each.name for each in result.results] == [
        each.name for each in suite.run_file(path, registry.specs_only()).results
    ]
    skipped = [problem.message for problem in log_suite.server_parts(path)]
    assert all("not tested here; trainmedic-server tests it" in message for message in skipped)


TOLD = """
tests:
  - name: wrong on purpose
    job: {name: llm-1, nodes: {node-1: [0-3], node-2: [4-7]}, fails: 3m}
    lines:
      - {source: training, rank: [0-7], text: out of memory on GPU 3}
      - {at: 30s, source: training, rank: 1, text: out of memory on GPU 3}
      - {at: 20m, source: training, rank: 2, text: out of memory on GPU 4}
      - {at: 21m, source: training, node: node-9, rank: 3, text: out of memory on GPU 5}
      - {at: 22m, source: training, rank: 5, text: all is well}
    expect:
      - {at: 10s, findings: [{rule: oom, count: 9, ranks: 0-8, over: true}], alerts: [{name: Other}]}
      - {at: 5m, findings: [], alerts: [{name: OutOfMemory, labels: {device: "4"}, over: true}]}
      - {findings: [{rule: oom, target: "gpu:x/1", role: cascade, fields: {gpu: "9"}}], verdict: {cause: hang, node: n}}
"""


CONFIRMED = RULE.replace("until: 1m", "confirm: {by: [fell], within: 2m}").replace(
    "---\nplaybook",
    """---
log_rule: fell
source: kernel
contains: ["fell off"]
role: root
cause: gpu
match: ['fell off']
ends: 'came back'
alert: {name: Fell, summary: "on {{ target.node }}", until: ends}
---
playbook""",
)
LATER = """
tests:
  - name: wrong on purpose
    job: {name: llm-1, nodes: {node-1: [0-3], node-2: [4-7]}}
    lines:
      - {source: training, rank: [0, 5], text: out of memory on GPU 3}
      - {at: 1m, source: kernel, node: node-1, text: GPU fell off, times: 3}
      - {at: 2m, source: kernel, node: node-1, text: GPU came back}
      - {at: 3m, source: kernel, node: node-1, text: GPU fell off}
      - {at: 30m, source: training, rank: 0, text: out of memory on GPU 3}
    expect:
      - {at: 30s, findings: [], alerts: [{name: None}]}
      - {at: 90s, findings: [], alerts: [{name: None}, {name: None}, {name: None}]}
      - {at: 150s, findings: [], alerts: [{name: OutOfMemory, over: true}, {name: Fell, summary: none, over: false}]}
      - {findings: [], alerts: []}
    end: 50m
"""


@pytest.mark.parametrize(("tests", "rules"), [(TOLD, RULE), (LATER, CONFIRMED)], ids=["merged", "confirmed"])
def test_without_a_server_findings_and_alerts_are_the_same(tmp_path: Path, tests: str, rules: str) -> None:
    """Merged, confirmed and ended alike: each complaint has the same place and words."""
    with_server = complaints(run(tmp_path, tests, rules))
    alone = complaints(log_suite.run_file(tmp_path / "a_test.yaml"))
    assert len(alone) >= 4
    assert alone == with_server


def test_lines_lead_to_what_a_playbook_does(tmp_path: Path) -> None:
    """One run for the ranks of two nodes; after the silence that the rule asks for the alert is over, and the next line
    begins another."""
    result = run(
        tmp_path,
        """
tests:
  - name: all the way
    job: {name: llm-1, nodes: {node-1: [0-3], node-2: [4-7]}}
    lines:
      - {source: training, rank: [2, 5], text: out of memory on GPU 1}
      - {at: 5m, source: training, rank: 2, text: out of memory on GPU 1}
    expect:
      - at: 30s
        findings: [{rule: oom, target: job:llm-1, count: 2, ranks: [2, 5], over: false, fields: {gpu: "1"}}]
        alerts: [{name: OutOfMemory, labels: {job_name: llm-1, device: "1", source: log}, over: false}]
        calls: [{action: notify}]
      - findings: [{rule: oom, over: true}, {rule: oom, count: 1}]
        calls: [notify, notify]
""",
    )
    assert complaints(result) == []


def test_what_is_expected_and_not_found_is_told_at_its_line(tmp_path: Path) -> None:
    """With what was found in its place."""
    result = run(
        tmp_path,
        """
tests:
  - name: wrong
    lines: [{source: training, rank: 0, text: out of memory on GPU 1}]
    expect:
      findings: [{rule: oom, count: 2}]
      alerts: []
""",
    )
    first, second = complaints(result)
    assert first == "6:37: wrong: at the end, findings[0].count: expected 2, got 1"
    assert second.startswith("7:15: wrong: at the end, alerts: expected 0, got 1:\n      OutOfMemory")


@pytest.mark.parametrize(
    ("tests", "complaint"),
    [
        ("{lines: [{source: training, text: x}], expect: {findings: [{rule: oon}]}}", "there is no log rule 'oon' under test; did you mean 'oom'?"),
        ("{lines: [{source: training, fixture: S1}], expect: {}}", "there is no fixture 'S1'"),
        ("{lines: [{source: trainng, text: x}], expect: {}}", "lines[0].source: there is no 'trainng'; did you mean 'training'?"),
        ("{lines: [{source: training}], expect: {}}", "lines[0]: a line has either `text` or `fixture`"),
        ("{lines: [{source: training, text: x, rank: many}], expect: {}}", "lines[0].rank: 'many' is not a rank; write one as 3, several as 0-7"),
        ("{lines: [{source: training, text: x, rank: 7-0}], expect: {}}", "lines[0].rank: '7-0' is not a rank; write one as 3, several as 0-7"),
        ("{lines: [{source: training, text: x, ranks: 1}], expect: {}}", "unknown key 'ranks'; did you mean 'rank'?"),
    ],
)  # fmt: skip
def test_a_test_that_asks_for_what_is_not_there_is_a_mistake(tmp_path: Path, tests: str, complaint: str) -> None:
    """It does not pass because nothing was compared."""
    (told,) = complaints(run(tmp_path, f"tests: [{{name: t, {tests[1:]}]"))
    assert complaint in told


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ("42", "1:1: must be a list of fixtures, such as - {id: NAME, text: LINE}"),
        ("S1: out of memory", "1:1: must be a list of fixtures, such as - {id: NAME, text: LINE}"),
        ("- {id: S1}", "1:3: a fixture needs an id and a text: - {id: NAME, text: LINE}"),
        ("- S1", "1:3: a fixture needs an id and a text: - {id: NAME, text: LINE}"),
    ],
)
def test_a_file_that_holds_no_fixtures_is_a_mistake_in_it(tmp_path: Path, written: str, complaint: str) -> None:
    """At its place, and no test is run."""
    (tmp_path / "lines.yaml").write_text(written)
    lines = "lines: [{source: training, fixture: S1}]"
    result = run(tmp_path, f"fixtures: lines.yaml\ntests: [{{name: t, {lines}, expect: {{}}}}]")
    assert complaints(result) == [complaint]
    assert result.results == ()


def test_a_rule_that_is_wrong_is_told(tmp_path: Path) -> None:
    """And no test of its file is run."""
    result = run(tmp_path, "tests: [{name: t, expect: {findings: []}}]", RULE.replace("role: root", "role: rot"))
    assert "'rot' is not one of root, cascade" in complaints(result)[0]
    assert result.results == ()


def test_a_verdict_that_is_not_the_expected_one_is_told_with_its_reason(tmp_path: Path) -> None:
    """Cause, confidence, and a node that may not be named."""
    result = run(
        tmp_path,
        """
tests:
  - name: wrong
    lines: [{source: training, rank: 0, text: out of memory on GPU 1}]
    expect:
      verdict: {cause: network, node: node-7, ranks: 0}
""",
    )
    cause, node = complaints(result)
    assert cause.startswith("6:24: wrong: at the end, verdict.cause: expected network, got gpu_memory (")
    assert node.startswith("6:39: wrong: at the end, verdict.node: expected node-7, got none (")


def test_a_line_needs_no_node_where_the_job_names_none(tmp_path: Path) -> None:
    lines = "{source: training, text: out of memory on GPU 1}"
    result = run(tmp_path, f"tests: [{{name: t, job: {{nodes: {{}}}}, lines: [{lines}], expect: {{findings: []}}}}]")
    assert "count" not in (told := complaints(result)[0])
    assert "findings: expected 0, got 1" in told
