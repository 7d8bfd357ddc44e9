"""``trainmedic logs``: shows the lines of a job (``log_lines``), and checks, explains and tests log rules without a
server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import click

from trainmedic_server import telemetry
from trainmedic_server.actions import registry
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.catalog import log_rule_roots
from trainmedic_server.catalog.log_rule_library import LogRuleLibrary
from trainmedic_server.catalog.schema import log_rule_schema
from trainmedic_server.cli import exits
from trainmedic_server.cli.client import Client, server_options
from trainmedic_server.cli.log_lines import line_options, show_lines
from trainmedic_server.cli.output import output_option
from trainmedic_server.domain.log_sources import SOURCES, misspelt
from trainmedic_server.domain.plain_text import json_text, visible
from trainmedic_server.logs.rule import RuleSet
from trainmedic_server.presentation import words
from trainmedic_server.simulation import report, suite
from trainmedic_server.simulation.check import check_log_rules, test_files
from trainmedic_server.simulation.log_lines import LineExplanation
from trainmedic_server.simulation.log_lines import explain as explain_lines

_paths = click.argument("paths", metavar="[PATH]...", nargs=-1, type=click.Path(path_type=Path))
rules_option = click.option(
    "--rules",
    "paths",
    metavar="PATH",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Where the rules are; can be repeated.",
)


@click.group(invoke_without_command=True)
@line_options
@server_options
def logs(client: Client, job: str | None, **conditions: Any) -> None:
    """Show the lines of a job; or check, explain and test log rules, without a server.

    \b
    trainmedic logs --job llm-1 --level error --since 1h
    trainmedic logs --job llm-1 --rank 7 --grep 'loss|grad' --follow

    For the commands without a PATH the rules are those of TRAINMEDIC_LOG_RULES, else those that come with Trainmedic.
    """
    if click.get_current_context().invoked_subcommand is None:
        if job is None:
            raise click.UsageError("name a job with --job, or a command: check, explain, schema, test")
        show_lines(client, job, **conditions)
        return
    # The command's output says better what the catalog would log.
    telemetry.configure_logging("CRITICAL")


@logs.command()
@_paths
def check(paths: Sequence[Path]) -> None:
    """Check log rules and the form of their tests.

    Each mistake is told with file, line and column. Ends with 1 where there is one, and with 2 where no rule is there.
    """
    roots = _roots(paths)
    rules, problems = check_log_rules(roots)
    for problem in problems:
        click.echo(visible(str(problem), keep="\n"))
    if problems:
        raise exits.Failure(words.count(len(problems), "mistake"))
    if not rules.rules:
        raise exits.InvalidInput(
            f"There is no log rule in {', '.join(map(str, roots))}: a rule is a YAML document with the key log_rule."
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
@_paths
@click.option("--verbose", "-v", is_flag=True, help="Name the tests that passed too.")
def test(paths: Sequence[Path], verbose: bool) -> None:
    """Run the tests beside the log rules, in virtual time.

    The tests of gpu.yaml are in gpu_test.yaml: lines, and what is found in them, which alerts that raises and what the
    playbooks do then. Ends with 1 where one fails.
    """
    files = test_files(_roots(paths))
    if not files:
        raise exits.InvalidInput("There is no file of tests there; their names end in _test.yaml.")
    results: list[suite.FileResult] = []
    for line in report.results(_tested(files, results), verbose=verbose):
        click.echo(line)
    if not all(result.passed for result in results):
        raise exits.Failure(words.count(sum(not result.passed for result in results), "file") + " failed")


def _tested(files: Sequence[Path], results: list[suite.FileResult]) -> Iterator[suite.FileResult]:
    """Each file's result as soon as it is there, so that its line shows how far the tests are."""
    actions = registry.specs_only()
    for file in files:
        results.append(suite.run_file(file, actions))
        yield results[-1]


@logs.command()
@click.argument("file", metavar="FILE", type=click.File("rb"))
@click.option(
    "--source",
    default="training",
    show_default=True,
    metavar="NAME",
    help="Whose lines they are: training, launcher, slurm, kernel, fabric-manager, or a name of your own.",
)
@rules_option
@click.option("--matched", is_flag=True, help="Only lines that a rule takes, ends with, or nearly takes.")
@output_option()
def explain(file: BufferedIOBase, source: str, paths: Sequence[Path], matched: bool, output: str) -> None:
    """Show the level, time and metrics of each line of a log, and which rule takes it, with which fields.

    FILE is a log as its program wrote it; - reads standard input. A time without a zone is shown without one. A rule
    comes near where its literal is in the line and its pattern is not. JSON is one object for each line.
    """
    rules = loaded(paths)
    if not any(source in rule.sources for rule in rules.rules):
        meant = misspelt(source, SOURCES)
        hint = f" Did you mean {meant!r}?" if meant else ""
        click.echo(visible(f"No rule is for the source {source!r}.{hint}"), err=True)
    for line in explain_lines(file, source, rules, SystemClock().now()):
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
    """The rules in `paths`, else the usual ones. What cannot be loaded of them is told.

    Raises:
        exits.InvalidInput: There are none.
    """
    library = LogRuleLibrary(_roots(paths))
    library.reload()
    for problem in library.problems:
        click.echo(visible(f"Not loaded: {problem}", keep="\n"), err=True)
    if not library.rule_set.rules:
        raise exits.InvalidInput("There are no log rules there.")
    return library.rule_set


def _roots(paths: Sequence[Path]) -> list[Path]:
    roots = log_rule_roots.roots(paths, os.environ)
    if not roots:
        raise exits.InvalidInput("There are no log rules; name their folder.")
    return roots
