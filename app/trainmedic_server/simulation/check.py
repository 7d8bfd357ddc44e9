"""Checks playbooks and log rules, and the files with their tests, without a server. Who calls it: ``cli.playbook`` and
``cli.logs``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainmedic_server.catalog import loader
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook
from trainmedic_server.catalog.library import Library
from trainmedic_server.catalog.log_rule_library import LogRuleLibrary
from trainmedic_server.domain.problems import FileProblem
from trainmedic_server.domain.target import IdentityLabels
from trainmedic_server.logs.rule import RuleSet
from trainmedic_server.ports.actions import Actions
from trainmedic_server.simulation import suite_format


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The playbooks that can be loaded, and every problem in the order of files and lines."""

    playbooks: tuple[YamlPlaybook, ...]
    problems: tuple[FileProblem, ...]


def check(roots: Sequence[Path], actions: Actions, identity: IdentityLabels = IdentityLabels()) -> CheckResult:
    """Check playbooks in directories or files as a server would load them, and the form of their tests."""
    tests = test_files(roots)
    library = Library([root for root in roots if root not in tests], actions, identity)
    library.reload()
    problems = list(library.problems)
    for path in tests:
        problems.extend(suite_format.read(path)[1])
    return CheckResult(tuple(library.all()), tuple(sorted(set(problems))))


def check_log_rules(roots: Sequence[Path]) -> tuple[RuleSet, tuple[FileProblem, ...]]:
    """Return the log rules in directories or files, and what is wrong with them and with the form of their tests."""
    tests = test_files(roots)
    library = LogRuleLibrary([root for root in roots if root not in tests])
    library.reload()
    problems = [*library.problems, *(problem for path in tests for problem in suite_format.read(path)[1])]
    return library.rule_set, tuple(sorted(set(problems)))


def test_files(roots: Iterable[Path]) -> list[Path]:
    """The files with tests among `roots` and in the directories among them, each once."""
    return list(dict.fromkeys(path for root in roots for path in loader.test_files(root) if loader.is_test(path)))
