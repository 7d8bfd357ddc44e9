"""Check of playbooks, alert maps, log rules and their tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from pathlib import Path

from msgspec import Struct

from trainmedic_core import yaml_files
from trainmedic_core.problems import FileProblem
from trainmedic_logs.lines.rule import RuleSet
from trainmedic_logs.simulation.log_check import rules_in, test_files
from trainmedic_server.catalog import alert_map_compiler, chains, overlaps
from trainmedic_server.catalog.alert_map_library import AlertMapLibrary
from trainmedic_server.catalog.compiled_playbook import YamlPlaybook
from trainmedic_server.catalog.library import Library
from trainmedic_server.ports.actions import Actions
from trainmedic_server.simulation import suite_format


class CheckResult(Struct, frozen=True):
    playbooks: tuple[YamlPlaybook, ...]
    problems: tuple[FileProblem, ...]
    warnings: tuple[FileProblem, ...] = ()
    """Likely mistakes in loadable playbooks."""
    empty: tuple[Path, ...] = ()
    """Paths without playbooks, fragments and problems."""
    fragments: int = 0


def check(roots: Sequence[Path], actions: Actions) -> CheckResult:
    """Check playbooks as a server loads them, and the format of their tests."""
    tests = test_files(roots)
    library = Library([root for root in roots if root not in tests], actions)
    library.reload()
    problems = list(library.problems)
    for path in tests:
        problems.extend(suite_format.read(path)[1])
    playbooks = tuple(library.all())
    found = [*(each.source for each in playbooks), *(each.source for each in library.fragments)]
    found += [each.file for each in problems]
    sources = [Path(source) for source in found]
    empty = tuple(root for root in roots if root not in tests and not any(_is_in(source, root) for source in sources))
    hints = (*_unused_fragments(library), *_without_content(roots, {*sources, *tests, *empty}))
    warnings = (*overlaps.warnings(playbooks, actions), *chains.warnings(playbooks), *hints)
    return CheckResult(playbooks, tuple(sorted(set(problems))), warnings, empty, len(library.fragments))


def _unused_fragments(library: Library) -> Iterator[FileProblem]:
    used = {
        (Path(playbook.source).parent, use.fragment) for playbook in library.all() for use in playbook.uses.values()
    }
    for place in library.fragments if not library.problems else ():
        if (Path(place.source).parent, place.name) not in used:
            hint = f"hint: no playbook here uses fragment {place.name!r}; write {{use: {place.name}}} as a step"
            yield FileProblem(place.source, place.line, 1, hint)


def _without_content(roots: Sequence[Path], known: Set[Path]) -> Iterator[FileProblem]:
    for file in (file for root in roots if root not in known for file in yaml_files.document_files(root)):
        if isinstance(file, Path) and file not in known and not str(yaml_files.read_text(file)).strip():
            yield FileProblem(str(file), None, None, "hint: the file is empty; a playbook begins with playbook: NAME")


def check_alert_maps(
    roots: Sequence[Path], playbooks: Sequence[YamlPlaybook] | None, actions: Actions
) -> tuple[AlertMapLibrary, tuple[FileProblem, ...]]:
    """Return the alert map, and warnings, which consider the playbooks if given."""
    library = AlertMapLibrary(roots)
    library.reload()
    warnings = alert_map_compiler.warnings(library.contents, playbooks, actions)
    return library, tuple(sorted(set(warnings)))


def _is_in(file: Path, root: Path) -> bool:
    return file == root or root in file.parents


def check_log_rules(roots: Sequence[Path]) -> tuple[RuleSet, tuple[FileProblem, ...]]:
    rules, problems = rules_in(roots)
    of_tests = (problem for path in test_files(roots) for problem in suite_format.read(path)[1])
    return rules, tuple(sorted({*problems, *of_tests}))
