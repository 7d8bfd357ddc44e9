"""``trainmedic logs check``, ``schema``, ``test`` and ``explain``.

With the server's packages, ``cli.logs`` replaces them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from io import BufferedIOBase
from pathlib import Path

import click

from trainmedic.wire import steady_time
from trainmedic_core import words, yaml_files
from trainmedic_core.cli import exits
from trainmedic_core.cli.output import output_option
from trainmedic_core.plain_text import json_text, visible
from trainmedic_core.problems import FileProblem
from trainmedic_logs.domain.log_sources import SOURCES, misspelt
from trainmedic_logs.lines.rule import RuleSet
from trainmedic_logs.rules import log_rule_roots
from trainmedic_logs.rules.log_rule_form import log_rule_schema
from trainmedic_logs.rules.log_rule_library import LogRuleLibrary
from trainmedic_logs.simulation import log_suite, test_results
from trainmedic_logs.simulation.log_check import check_log_rules, test_files
from trainmedic_logs.simulation.log_lines import LineExplanation
from trainmedic_logs.simulation.log_lines import explain as explain_lines
from trainmedic_logs.simulation.test_results import FileResult

paths_argument = click.argument("paths", metavar="[PATH]...", nargs=-1, type=click.Path(path_type=Path))
rules_option = click.option(
    "--rules",
    "paths",
    metavar="PATH",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Path of a rule file or directory; repeatable.",
)


@click.group()
def logs() -> None:
    """Check, explain and test log rules.

    Without PATH, commands use the rules in TRAINMEDIC_LOG_RULES, else the shipped rules.
    """
    # The command reports loading errors itself.
    logging.getLogger().setLevel(logging.CRITICAL)


@logs.command()
@paths_argument
def check(paths: Sequence[Path]) -> None:
    """Check log rules and the format of their tests.

    Prints each error with file, line and column. The exit code is 1 if there are errors, and 2 if there is no rule.
    Expectations about playbooks are checked only if trainmedic-server is installed.
    """
    roots = rule_roots(paths)
    checked = check_log_rules(roots)
    for place in checked.server_parts:
        click.echo(visible(str(place), keep="\n"), err=True)
    report_checked(roots, checked.rules, checked.problems)


def report_checked(roots: Sequence[Path], rules: RuleSet, problems: Sequence[FileProblem]) -> None:
    """Print problems, or the number of rules. Raises exits.Failure, exits.InvalidInput."""
    for problem in problems:
        click.echo(visible(str(problem), keep="\n"))
    if problems:
        raise exits.Failure(words.count(len(problems), "mistake"))
    if not rules.rules:
        raise exits.InvalidInput(
            f"No log rule found in {', '.join(map(str, roots))}; a rule is a YAML document with the key log_rule."
        )
    click.echo(f"{words.count(len(rules.rules), 'log rule')}, no mistake.")


@logs.command()
def schema() -> None:
    """Print the JSON Schema of log rules, for editors.

    \b
    trainmedic logs schema > log-rule.schema.json
    and on top of a file of rules:
    # yaml-language-server: $schema=log-rule.schema.json
    """
    click.echo(json.dumps(log_rule_schema(), indent=2))


@logs.command()
@paths_argument
@click.option("--verbose", "-v", is_flag=True, help="Also show passed tests.")
def test(paths: Sequence[Path], verbose: bool) -> None:
    """Run the tests next to the log rules, in virtual time: findings, their alerts and verdicts.

    Exit code 1 if one fails. What playbooks do is tested only if trainmedic-server is installed.
    """
    files = found_tests(rule_roots(paths))
    for place in (place for file in files for place in log_suite.server_parts(file)[:1]):
        click.echo(visible(str(place), keep="\n"), err=True)
    show_results(files, log_suite.run_file, verbose=verbose)


def found_tests(roots: Sequence[Path]) -> list[Path]:
    """Raises exits.InvalidInput for a missing path, and without a test file."""
    if missing := [str(root) for root in roots if not yaml_files.exists(root)]:
        raise exits.InvalidInput(f"{visible(', '.join(missing))}: there is no such file or directory")
    if not (files := test_files(roots)):
        places = visible(", ".join(map(str, roots)))
        raise exits.InvalidInput(f"No test files found in {places}; their names end in _test.yaml.")
    return files


def show_results(files: Sequence[Path], run_file: Callable[[Path], FileResult], *, verbose: bool) -> None:
    """Raises exits.Failure if a test fails."""
    results: list[FileResult] = []

    def tested() -> Iterator[FileResult]:
        for file in files:
            results.append(run_file(file))
            yield results[-1]

    for line in test_results.results(tested(), verbose=verbose):
        click.echo(line)
    if not all(result.passed for result in results):
        raise exits.Failure(words.count(sum(not result.passed for result in results), "file") + " failed")


@logs.command()
@click.argument("file", metavar="FILE", type=click.File("rb"))
@click.option(
    "--source",
    default="training",
    show_default=True,
    metavar="NAME",
    help="Source of the lines: training, launcher, slurm, kernel, fabric-manager, or your own name.",
)
@rules_option
@click.option("--matched", is_flag=True, help="Show only lines that a rule matches, ends on, or nearly matches.")
@output_option()
def explain(file: BufferedIOBase, source: str, paths: Sequence[Path], matched: bool, output: str) -> None:
    """Show level, time, metrics and matching rule of each log line.

    FILE is a log file; - reads standard input. Times without a zone are shown without one. "near" names rules whose
    literal is in the line, but no pattern. JSON output has one object per line.
    """
    rules = loaded(paths)
    if not any(source in rule.sources for rule in rules.rules):
        meant = misspelt(source, SOURCES)
        hint = f" Did you mean {meant!r}?" if meant else ""
        click.echo(visible(f"No rule covers the source {source!r}.{hint}"), err=True)
    for line in explain_lines(file, source, rules, steady_time.OF_PROCESS.now()):
        if matched and line.match.rule is None and not line.match.near and not line.match.ended:
            continue
        click.echo(json_text(line.as_data()) if output == "json" else _shown(line))


def _shown(line: LineExplanation) -> str:
    match = line.match
    said = f"{match.rule.name} ({match.role}, {match.cause})" if match.rule else "-"
    if match.rule and match.fields:
        said += " " + json_text(line.as_data()["fields"])
    said += "".join(f" ends {rule.name}" for rule, _ in match.ended)
    said += f" near {', '.join(match.near)}" if match.near else ""
    data = line.as_data()
    said += "".join(f" {name}={value}" for name, value in data["metrics"].items())
    first = line.text.partition("\n")[0]
    return visible(f"{line.number:>6}  {data['time'] or '-'} {line.level.value}  {said}  | {first[:160]}")


def loaded(paths: Sequence[Path]) -> RuleSet:
    """Return the rules in `paths`, else the default ones, and print problems.

    Raises exits.InvalidInput without rules.
    """
    library = LogRuleLibrary(rule_roots(paths))
    library.reload()
    for problem in library.problems:
        click.echo(visible(f"Not loaded: {problem}", keep="\n"), err=True)
    if not library.rule_set.rules:
        raise exits.InvalidInput("No log rules found. Pass the path of a rule file or directory.")
    return library.rule_set


def rule_roots(paths: Sequence[Path]) -> list[Path]:
    """Return `paths`, else the setting's, else the shipped ones. Raises exits.InvalidInput without any."""
    roots = log_rule_roots.roots(paths, os.environ)
    if not roots:
        raise exits.InvalidInput("No log rules found. Pass the path of a rule file or directory.")
    return roots
