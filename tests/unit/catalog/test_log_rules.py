"""Log rules as they are written: what is wrong with them, and where; reloading; and the schema."""

# ruff: noqa: E501 (a case is one line)

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from trainmedic_core import yaml_files
from trainmedic_logs.domain.finding import CauseClass, Role
from trainmedic_logs.lines import rendering
from trainmedic_logs.lines.rule import LogRule
from trainmedic_logs.rules import log_rule_roots
from trainmedic_logs.rules.log_rule_form import log_rule_schema
from trainmedic_logs.rules.log_rule_library import LogRuleLibrary, load
from trainmedic_server.actions import registry
from trainmedic_server.catalog.library import Library

GOOD = """\
log_rule: oom
source: training
contains: ["out of memory"]
match: ['out of memory on (?P<gpu>\\w+)']
role: root
cause: gpu_memory
alert: {name: OutOfMemory, labels: {gpu_name: "{{ fields.gpu }}"}, until: attempt}
"""


def problems(text: str) -> list[str]:
    return [f"{problem.line}:{problem.column}: {problem.message}" for problem in load(dedent(text), "a.yaml")[1]]


def rule(text: str) -> LogRule:
    (placed,), wrong = load(text, "a.yaml")
    assert wrong == []
    return placed.rule


def test_a_rule_is_read() -> None:
    """Omitted keys get their defaults."""
    oom = rule(GOOD)
    assert (oom.name, oom.sources, oom.role, oom.cause) == ("oom", ("training",), Role.ROOT, CauseClass.GPU_MEMORY)
    assert (oom.until, oom.alert and oom.alert.severity) == ("attempt", "warning")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("role: root", "role: roots"), "5:7: role: 'roots' is not one of root, cascade, confirmation, teardown, noise; did you mean 'root'?"),
        (("cause:", "couse:"), "6:1: unknown key 'couse'; did you mean 'cause'?"),
        (("source: training", "source: trainng"), "2:9: source: there is no 'trainng'; did you mean 'training'?"),
        (("source: training", "source: My Log"), "2:9: source: 'My Log' is not a valid source; use at most 63 lower-case letters, digits"),
        (("source: training", "source: Training"), "2:9: source: there is no 'Training'; did you mean 'training'?"),
        (("source: training", "source: kernal"), "2:9: source: there is no 'kernal'; did you mean 'kernel'?"),
        (("contains: [\"out of memory\"]\n", "record: stpe\n"), "3:9: record: there is no event 'stpe'; did you mean 'step'?"),
        (("until: attempt", "until: atempt"), "7:75: alert.until: 'atempt' is not a duration; write it as Prometheus does: 90s, 10m, 1h30m; did you mean 'attempt'?"),
        (("source: training\n", ""), "1:1: 'source' is missing"),
        (('contains: ["out of memory"]\n', ""), "1:1: contains: a rule needs a literal"),
        (('"out of memory"', '"ou"'), "3:12: contains: 'ou' is in nearly every line; use at least 3 characters"),
        (("(?P<gpu>", "(?P<gpu"), "4:9: match: not a regular expression"),
        (("out of memory on (?P<gpu>\\w+)", "(?=a)b"), "4:9: match: not a regular expression: invalid perl operator: (?=; RE2 has neither look-around nor"),
        (("out of memory on (?P<gpu>\\w+)", "(?:[^x]{0,900}){0,1}y"), "4:9: match: the regular expression is too large"),
        (("fields.gpu", "fields.gbu"), "7:47: gpu_name: no pattern has a group 'gbu'; did you mean 'gpu'?"),
        (("fields.gpu", "field.gpu"), "7:47: gpu_name: there is no name 'field' here; did you mean 'fields'?"),
        (("fields.gpu }}", "fields.gpu"), "7:47: gpu_name:"),
        (("fields.gpu }}", "target.jobb }}"), "7:47: gpu_name: there is no name 'target' here"),
        (("until: attempt", 'summary: "{{ target.jobb }}"'), "7:77: summary: target has no 'jobb'; did you mean 'job'?"),
        (("until: attempt", 'summary: "{{ finding.hosts }}"'), "7:77: summary: finding has no 'hosts'; there are count, line, rule"),
        (("cause: gpu", "when: xyd(1)\ncause: gpu"), "6:7: when: there is no name 'xyd' here; did you mean 'xid'?"),
        (("gpu_name:", "job_name:"), "7:37: alert.labels: 'job_name' is set by Trainmedic itself"),
        (("gpu_name:", "GPU_index:"), "7:37: alert.labels: 'GPU_index' is set by Trainmedic itself"),
        (("gpu_name:", "gpu-name:"), "7:37: alert.labels: 'gpu-name' is not a valid label name"),
        (("until: attempt", "until: ends"), "7:75: alert.until: `ends` requires the key `ends`"),
        (("until: attempt", "until: soon"), "7:75: alert.until: 'soon' is not a duration"),
        (("until: attempt", "until: 1001y"), "7:75: alert.until: 365365d is too long; write at most 365000d"),
        (("cause: gpu", "count: {at_least: 3, per: 1001y}\ncause: gpu"), "6:27: count.per: 365365d is too long; write at most 365000d"),
        (("until: attempt", "severity: bad"), "7:78: alert.severity: there is no 'bad'; there are critical, warning, info"),
        (("role: root", "role: cascade"), "7:8: alert: a rule of role cascade raises no alert"),
        (("cause: gpu", "target: node\ncause: gpu"), "6:9: target: only lines of the kernel or the fabric manager are about a node"),
        (("cause: gpu", "target: gpu\ngpu: x\ncause: gpu"), "6:9: target: only lines of the kernel or the fabric manager are about a gpu"),
        (("cause: gpu", "gpu: x\ncause: gpu"), "6:6: gpu: required if the target is a gpu, and not allowed otherwise"),
        (("cause: gpu", "target: cluster\ncause: gpu"), "6:9: target: must be job, node or gpu"),
        (("cause: gpu", "for: 1m\ncause: gpu"), "6:6: for: requires `ends`"),
        (("cause: gpu", "count: {at_least: 3}\ncause: gpu"), "6:8: count: requires either `per` or `in_a_row: true`"),
        (("cause: gpu", "count: {at_least: 3, in_a_row: true}\ncause: gpu"), "6:32: count: only records can be counted in a row"),
        (("cause: gpu", "count: {at_least: 1, per: 1m}\ncause: gpu"), "6:19: count.at_least:"),
    ],
)  # fmt: skip
def test_each_mistake_is_reported_with_its_place(change: tuple[str, str], problem: str) -> None:
    """The message has line and column of the fault, and the nearest valid word."""
    told = problems(GOOD.replace(*change))
    assert any(each.startswith(problem) for each in told), told


def test_a_boolean_in_a_label_is_written_as_in_yaml() -> None:
    read = rule(GOOD.replace("fields.gpu", "fields.gpu == '3'"))
    assert rendering.labels_of(read, {"gpu": "3"}) == {"gpu_name": "true"}


def test_an_invalid_rule_does_not_affect_others() -> None:
    """All mistakes of a file are reported, and its other rules load."""
    rules, wrong = load(GOOD + "---\n" + GOOD.replace("oom", "b").replace("root", "x"), "a.yaml")
    assert [placed.rule.name for placed in rules] == ["oom"]
    assert len(wrong) == 1
    assert (wrong[0].line, wrong[0].column) == (13, 7)


def test_too_many_documents_are_a_problem() -> None:
    """The first 500 are used."""
    text = "---\n".join(GOOD.replace("oom", f"oom_{number}", 1) for number in range(502))
    placed, wrong = load(text, "a.yaml")
    assert (len(placed), placed[-1].rule.name) == (500, "oom_499")
    assert [problem.message for problem in wrong] == ["a file has at most 500 documents"]
    assert wrong[0].line == text[: text.index("oom_500")].count("\n") + 1


def test_too_many_files_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One problem is reported, at the first such file."""
    monkeypatch.setattr(yaml_files, "MOST_FILES", 2)
    for name in "abcd":
        (tmp_path / f"{name}.yaml").write_text(GOOD.replace("oom", name, 1))
    library = LogRuleLibrary([tmp_path])
    library.reload()
    assert [each.rule.name for each in library.placed] == ["a", "b"]
    (problem,) = library.problems
    assert Path(problem.file).name == "c.yaml"
    assert problem.message.startswith("not searched for log rules")


def test_rules_and_playbooks_can_share_a_folder(tmp_path: Path) -> None:
    """Each library reads its own documents, and ignores the others."""
    playbook = "playbook: tell\non: {alert: A}\ntarget: job\nsteps: [{action: notify, with: {message: m}}]\n"
    (tmp_path / "both.yaml").write_text(f"{playbook}---\n{GOOD}")
    playbooks = Library([tmp_path], registry.specs_only())
    playbooks.reload()
    rules = LogRuleLibrary([tmp_path])
    rules.reload()
    assert ([each.definition.name for each in playbooks.all()], list(playbooks.problems)) == (["tell"], [])
    assert (list(rules.rule_set.by_name), list(rules.problems)) == (["oom"], [])


def test_a_change_is_loaded_and_a_mistake_keeps_the_previous_rules(tmp_path: Path) -> None:
    """The last good rules of a file stay until it is fixed or deleted."""
    path = tmp_path / "a.yaml"
    path.write_text(GOOD)
    library = LogRuleLibrary([tmp_path])
    assert library.reload()
    assert not library.reload()
    path.write_text(GOOD.replace("role: root", "role: x"))
    assert not library.reload()
    assert (list(library.rule_set.by_name), len(library.problems)) == (["oom"], 1)
    path.write_text(GOOD.replace("oom", "other"))
    assert library.reload()
    assert (list(library.rule_set.by_name), list(library.problems)) == (["other"], [])
    path.unlink()
    assert library.reload()
    assert library.rule_set.rules == ()


def test_missing_playbooks_are_not_reported_as_a_log_rule(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their own library reports it; a missing folder of rules is reported here."""
    absent = tmp_path / "playbooks"
    library = LogRuleLibrary([], beside=[absent])
    library.reload()
    assert (list(library.problems), caplog.records) == ([], [])
    named = LogRuleLibrary([absent], beside=[absent])
    named.reload()
    assert [str(problem) for problem in named.problems] == [f"{absent}: there is no such file or directory"]
    assert [(each.getMessage(), vars(each)["problem"]) for each in caplog.records] == [
        ("cannot load log rule", str(named.problems[0]))
    ]


def test_the_first_of_two_rules_with_one_name_stays(tmp_path: Path) -> None:
    """The second one is reported."""
    (tmp_path / "b.yaml").write_text(GOOD)
    library = LogRuleLibrary([tmp_path])
    library.reload()
    (tmp_path / "a.yaml").write_text(GOOD)
    library.reload()
    (problem,) = library.problems
    assert (Path(problem.file).name, problem.line) == ("a.yaml", 1)
    assert "that one is used" in problem.message


@pytest.mark.parametrize(
    "text", ["log_rule: [", "log_rule: x\nsource: {a: b}", "log_rule: 3", "- log_rule: x", "log_rule: x\n" * 2]
)
def test_no_text_raises_an_exception(text: str) -> None:
    """Mistakes are returned as values."""
    rules, wrong = load(text, "a.yaml")
    assert rules == []
    assert wrong or text.startswith("-")


def test_the_schema_knows_the_keys() -> None:
    """A list of one may also be written without its list."""
    schema = log_rule_schema()
    properties: dict[str, Any] = schema["properties"]
    assert {"log_rule", "source", "for", "match", "alert"} <= properties.keys()
    assert {"type": "string"} in properties["source"]["anyOf"]
    confirmed_by = schema["$defs"]["ConfirmForm"]["properties"]["by"]["anyOf"]
    assert [each["type"] for each in confirmed_by] == ["string", "array"]
    assert schema["required"] == ["log_rule", "source", "role"]


def test_the_shipped_rules_are_found_without_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This works in a checkout, from any directory; a setting or a name takes precedence."""
    monkeypatch.chdir(tmp_path)
    (found,) = log_rule_roots.roots((), {})
    assert (found / "nccl.yaml").exists()
    assert log_rule_roots.roots((), {"TRAINMEDIC_LOG_RULES": "/a:/b"}) == [Path("/a"), Path("/b")]
    assert log_rule_roots.roots((tmp_path,), {"TRAINMEDIC_LOG_RULES": "/a"}) == [tmp_path]
