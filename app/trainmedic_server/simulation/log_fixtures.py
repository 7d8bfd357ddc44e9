"""The lines that tests of log rules name by their ids, from the file beside them. Who calls it: ``suite``."""

from __future__ import annotations

from trainmedic_server.catalog import yaml_files, yaml_text
from trainmedic_server.domain.problems import FileProblem
from trainmedic_server.simulation.suite_format import Suite


def of_suite(suite: Suite) -> tuple[dict[str, str], list[FileProblem]]:
    """The lines of the suite's file of fixtures by their ids, and what is wrong with it or with their use."""
    known: dict[str, str] = {}
    if suite.spec.fixtures is not None:
        path = suite.path.parent / suite.spec.fixtures
        text = yaml_files.read_text(path)
        if isinstance(text, FileProblem):
            return {}, [text]
        documents, problems = yaml_text.read(text, str(path))
        if problems:
            return {}, problems
        entries = [entry for document in documents for entry in document.value if isinstance(document.value, list)]
        known = {str(entry["id"]): str(entry["text"]) for entry in entries if isinstance(entry, dict)}
    wrong = [
        suite.problem(("tests", index, "lines", number, "fixture"), f"there is no fixture {line.fixture!r}")
        for index, test in enumerate(suite.spec.tests)
        for number, line in enumerate(test.lines)
        if line.fixture is not None and line.fixture not in known
    ]
    return known, wrong
