from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from trainmedic_core import yaml_files
from trainmedic_core.problems import FileProblem
from trainmedic_logs.lines.rule import RuleSet
from trainmedic_logs.rules.log_rule_library import LogRuleLibrary
from trainmedic_logs.simulation import log_fixtures, log_test_format


class CheckedRules(Struct, frozen=True):
    rules: RuleSet
    problems: tuple[FileProblem, ...]
    server_parts: tuple[FileProblem, ...]
    """Parts that only the server can check."""


def check_log_rules(roots: Sequence[Path]) -> CheckedRules:
    rules, of_rules = rules_in(roots)
    problems, for_server = list(of_rules), []
    for path in test_files(roots):
        suites, wrong = log_test_format.read(path)
        problems.extend(wrong)
        for suite in suites:
            problems.extend(log_fixtures.read_fixtures(suite)[1])
        # One per file suffices.
        for_server.extend([part for suite in suites for part in _server_parts(suite)][:1])
    return CheckedRules(rules, tuple(sorted(set(problems))), tuple(for_server))


def rules_in(roots: Sequence[Path]) -> tuple[RuleSet, Sequence[FileProblem]]:
    tests = test_files(roots)
    library = LogRuleLibrary([root for root in roots if root not in tests])
    library.reload()
    return library.rule_set, library.problems


def test_files(roots: Iterable[Path]) -> list[Path]:
    return list(dict.fromkeys(path for root in roots for path in yaml_files.test_files(root)))


def _server_parts(suite: log_test_format.LogSuite) -> list[FileProblem]:
    return [
        suite.problem(place, f"{key}: not checked here; trainmedic-server checks it", at_key=True)
        for place, key in suite.server_parts()
    ]
