"""``trainmedic playbook``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click

from trainmedic_core import words, yaml_files
from trainmedic_core.cli import exits
from trainmedic_core.cli.output import output_option
from trainmedic_core.plain_text import visible
from trainmedic_core.words import plain
from trainmedic_logs.cli.log_rules import found_tests
from trainmedic_logs.simulation import test_results
from trainmedic_logs.simulation.test_results import FileResult
from trainmedic_server import telemetry
from trainmedic_server.actions import registry
from trainmedic_server.catalog import alert_map_roots
from trainmedic_server.catalog.schema import json_schema
from trainmedic_server.cli.explain import explain
from trainmedic_server.cli.playbook_list import list_playbooks, list_versions
from trainmedic_server.cli.playbook_paths import (
    alert_map_option,
    loaded_alert_map,
    loaded_playbooks,
    playbook_roots,
    playbooks_option,
)
from trainmedic_server.cli.replay import replay
from trainmedic_server.domain.alert_suggestions import snippet
from trainmedic_server.simulation import report, rule_outcomes
from trainmedic_server.simulation.check import CheckResult, check_alert_maps
from trainmedic_server.simulation.check import check as check_paths
from trainmedic_server.simulation.rule_outcomes import RuleOutcome

_paths = click.argument("paths", metavar="[PATH]...", nargs=-1, type=click.Path(path_type=Path))


@click.group()
def playbook() -> None:
    """Check, explain and test playbooks, without a server.

    PATH is a file or a directory. Default: TRAINMEDIC_PLAYBOOKS, or else playbooks.
    """
    # The command's output covers what the catalog and the engine would log.
    telemetry.configure_logging("CRITICAL")


@playbook.command()
@_paths
@alert_map_option
def check(paths: Sequence[Path], alert_map: Sequence[Path]) -> None:
    """Check playbooks, the form of their tests, and the alert map.

    Each error is reported with file, line and column. Exit code: 1 after an error, 2 if PATH has no playbook. Warnings
    (two playbooks act on the same alert, none reacts to a name of the alert map) do not change it. With --alert-map and
    without playbooks, only the map is checked.
    """
    actions, roots = registry.specs_only(), playbook_roots(paths)
    has_playbooks = bool(paths) or not alert_map or any(yaml_files.exists(root) for root in roots)
    checked = check_paths(roots, actions) if has_playbooks else CheckResult((), ())
    library, warnings = check_alert_maps(
        alert_map_roots.roots(alert_map, {}), checked.playbooks if has_playbooks else None, actions
    )
    problems = (*checked.problems, *library.problems)
    for problem in (*problems, *checked.warnings, *warnings):
        click.echo(visible(str(problem), keep="\n"))
    if problems:
        raise exits.Failure(words.count(len(problems), "mistake"))
    if checked.empty:
        raise exits.InvalidInput(f"No playbook found in {', '.join(map(str, checked.empty))}.")
    counted = [words.count(len(checked.playbooks), "playbook")] if has_playbooks else []
    if checked.fragments:
        counted.append(words.count(checked.fragments, "fragment"))
    if alert_map:
        renames = sum(len(content.renames) for content in library.contents)
        counted.append(f"{words.count(renames, 'rename')} in {words.count(len(library.contents), 'alert map')}")
    click.echo(f"{', '.join(counted)}, no mistake.")


@playbook.command()
@click.argument("files", metavar="RULES...", nargs=-1, required=True, type=click.Path(path_type=Path))
@playbooks_option
@alert_map_option
@output_option()
def rules(files: Sequence[Path], paths: Sequence[Path], alert_map: Sequence[Path], output: str) -> None:
    """Print which playbook each alert of your rules starts, or why it starts none.

    RULES is a file of Prometheus rules, or a Kubernetes PrometheusRule. If a name means an alert that a playbook reacts
    to, the entry for your alert map is printed. RULES can also be a list of alerts with expected outcomes, like
    alert-maps/public-rules_test.yaml; the exit code is 1 if one differs.

    \b
    trainmedic playbook rules prometheus/rules/*.yaml --alert-map shipped --alert-map my-map.yaml
    """
    read = [rule_outcomes.read(file) for file in files]
    for problem in (problem for _, problems in read for problem in problems):
        click.echo(visible(str(problem), keep="\n"), err=True)
    alerts = [alert for each, _ in read for alert in each]
    if not alerts:
        raise exits.InvalidInput("These files contain no alert.")
    library = loaded_playbooks(paths, registry.specs_only())
    outcomes = rule_outcomes.outcomes(alerts, loaded_alert_map(alert_map), library.all())
    if output == "json":
        click.echo(json.dumps([outcome.as_data() for outcome in outcomes], indent=2))
    else:
        for line in _outcome_lines(outcomes):
            click.echo(line)
    if any(problems for _, problems in read):
        raise exits.Failure("a rule file could not be read completely")
    if wrong := sum(not outcome.is_as_expected for outcome in outcomes):
        raise exits.Failure(
            f"{words.count(wrong, 'alert')} of {len(outcomes)} had another outcome than the list states"
        )


@playbook.command()
def schema() -> None:
    """Print the JSON Schema of the playbook language, for editors.

    \b
    trainmedic playbook schema > playbook.schema.json
    and on top of a playbook:
    # yaml-language-server: $schema=playbook.schema.json
    """
    click.echo(json.dumps(json_schema(registry.specs_only()), indent=2))


playbook.add_command(explain)
playbook.add_command(replay)


@playbook.command()
@_paths
@click.option("--verbose", "-v", is_flag=True, help="List passed tests, too.")
@click.option("as_json", "--json", is_flag=True, help="Print one JSON document with every test.")
def test(paths: Sequence[Path], verbose: bool, as_json: bool) -> None:
    """Run the tests next to the playbooks, in virtual time.

    The tests of gpu.yaml are in gpu_test.yaml. Exit code 1 if one fails.
    """
    files = found_tests(playbook_roots(paths))
    results: list[FileResult] = []
    if as_json:
        click.echo(json.dumps(report.document(_tested(files, results))))
    else:
        for line in test_results.results(_tested(files, results), verbose=verbose):
            click.echo(line)
    if not all(result.passed for result in results):
        raise exits.Failure(words.count(sum(not result.passed for result in results), "file") + " failed")


def _tested(files: Iterable[Path], results: list[FileResult]) -> Iterator[FileResult]:
    """Yield each result at once, to show the progress, and append it to `results`."""
    from trainmedic_server.simulation import suite  # imports SQLAlchemy, which only tests need

    actions = registry.specs_only()
    for file in files:
        results.append(suite.run_file(file, actions))
        yield results[-1]


playbook.add_command(list_playbooks)
playbook.add_command(list_versions)


def _outcome_lines(outcomes: Sequence[RuleOutcome]) -> Iterator[str]:
    width = max(len(plain(outcome.alert.name)) for outcome in outcomes)
    for outcome in outcomes:
        yield f"{plain(outcome.alert.name):<{width}}  {_outcome_text(outcome)}"
    suggested = {outcome.alert.name: outcome.suggestion for outcome in outcomes if outcome.suggestion is not None}
    if suggested:
        yield ""
        yield "Possible entries of an alert map; playbook explain shows what would happen then:"
        yield "rename:"
        for name, suggestion in suggested.items():
            yield from (plain(line) for line in snippet(name, suggestion).splitlines()[1:])
    starting = sum(bool(outcome.playbooks) for outcome in outcomes)
    yield ""
    yield f"{len(outcomes)} alerts: {starting} with a playbook, {len(outcomes) - starting} without."


def _outcome_text(outcome: RuleOutcome) -> str:
    renamed = f"as {plain(outcome.renamed_to)}: " if outcome.renamed_to is not None else ""
    expected = "" if outcome.is_as_expected else f"  NOT AS EXPECTED: {outcome.alert.expected or 'none'}"
    if outcome.playbooks:
        conditions = f", if {' and '.join(map(plain, outcome.conditions))}" if outcome.conditions else ""
        return f"{renamed}{', '.join(outcome.playbooks)}{conditions}{expected}"
    suggested = f"; it may mean {outcome.suggestion.name}, see below" if outcome.suggestion is not None else ""
    return f"{renamed}none: {plain(outcome.reason)}{suggested}{expected}"
