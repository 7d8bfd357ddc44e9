from __future__ import annotations

from collections.abc import Iterator

from trainmedic_core import yaml_files, yaml_text
from trainmedic_core.problems import FileProblem, did_you_mean
from trainmedic_core.yaml_text import YamlDocument
from trainmedic_logs.lines.rule import RuleSet
from trainmedic_logs.simulation.log_test_format import LogSuite


def read_fixtures(suite: LogSuite) -> tuple[dict[str, str], list[FileProblem]]:
    """Return texts by ID, and problems."""
    known: dict[str, str] = {}
    if suite.spec.fixtures is not None:
        path = suite.path.parent / suite.spec.fixtures
        text = yaml_files.read_text(path)
        if isinstance(text, FileProblem):
            return {}, [text]
        documents, problems = yaml_text.read(text, str(path))
        problems += [problem for document in documents for problem in _malformed(document)]
        if problems:
            return {}, problems
        known = {str(entry["id"]): str(entry["text"]) for document in documents for entry in document.value}
    wrong = [
        suite.problem(("tests", index, "lines", number, "fixture"), f"there is no fixture {line.fixture!r}")
        for index, test in enumerate(suite.spec.tests)
        for number, line in enumerate(test.lines)
        if line.fixture is not None and line.fixture not in known
    ]
    return known, wrong


def _malformed(document: YamlDocument) -> Iterator[FileProblem]:
    if not isinstance(document.value, list):
        yield document.problem((), "must be a list of fixtures, such as - {id: NAME, text: LINE}")
        return
    for index, entry in enumerate(document.value):
        if not isinstance(entry, dict) or not {"id", "text"} <= entry.keys():
            yield document.problem((index,), "a fixture needs an id and a text: - {id: NAME, text: LINE}")


def unknown_rules(suite: LogSuite, rules: RuleSet) -> Iterator[FileProblem]:
    names = rules.by_name
    for index, test in enumerate(suite.spec.tests):
        for number, check in enumerate(test.expect):
            for position, finding in enumerate(check.findings or ()):
                if finding.rule not in names:
                    path = ("tests", index, "expect", number, "findings", position, "rule")
                    message = f"there is no log rule {finding.rule!r} under test{did_you_mean(finding.rule, names)}"
                    yield suite.problem(path, message)
