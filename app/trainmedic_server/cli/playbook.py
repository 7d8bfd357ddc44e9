"""``trainmedic playbook``: checks, explains and tests playbooks without a server, by the ``simulation``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click

from trainmedic_server import telemetry
from trainmedic_server.actions import registry
from trainmedic_server.catalog.schema import json_schema
from trainmedic_server.cli import exits
from trainmedic_server.cli.explain import explain
from trainmedic_server.cli.playbook_list import list_playbooks, list_versions
from trainmedic_server.cli.playbook_paths import playbook_roots
from trainmedic_server.domain.plain_text import visible
from trainmedic_server.simulation import report, suite
from trainmedic_server.simulation.check import check as check_paths
from trainmedic_server.simulation.check import test_files

_paths = click.argument("paths", metavar="[PATH]...", nargs=-1, type=click.Path(path_type=Path))


@click.group()
def playbook() -> None:
    """Check, explain and test playbooks, without a server.

    PATH is a file or a directory; without one it is TRAINMEDIC_PLAYBOOKS, else playbooks.
    """
    # The command's output says better what the catalog and the engine would log.
    telemetry.configure_logging("CRITICAL")


@playbook.command()
@_paths
def check(paths: Sequence[Path]) -> None:
    """Check playbooks and the form of their tests.

    Each mistake is told with file, line and column. Ends with 1 where there is one, and with 2 where PATH has no
    playbook. A warning, such as that two playbooks act on the same alert, changes nothing of that.
    """
    checked = check_paths(playbook_roots(paths), registry.specs_only())
    for problem in (*checked.problems, *checked.warnings):
        click.echo(visible(str(problem), keep="\n"))
    if checked.problems:
        raise exits.Failure(_count(len(checked.problems), "mistake"))
    if checked.empty:
        raise exits.InvalidInput(f"There is no playbook in {', '.join(map(str, checked.empty))}.")
    click.echo(f"{_count(len(checked.playbooks), 'playbook')}, no mistake.")


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


@playbook.command()
@_paths
@click.option("--verbose", "-v", is_flag=True, help="Name the tests that passed too.")
@click.option("as_json", "--json", is_flag=True, help="Print one JSON document with every test, for programs.")
def test(paths: Sequence[Path], verbose: bool, as_json: bool) -> None:
    """Run the tests beside the playbooks, in virtual time.

    The tests of gpu.yaml are in gpu_test.yaml. Ends with 1 where one fails.
    """
    files = test_files(playbook_roots(paths))
    if not files:
        raise exits.InvalidInput("There is no file of tests there; their names end in _test.yaml.")
    results: list[suite.FileResult] = []
    if as_json:
        click.echo(json.dumps(report.document(_tested(files, results))))
    else:
        for line in report.results(_tested(files, results), verbose=verbose):
            click.echo(line)
    if not all(result.passed for result in results):
        raise exits.Failure(_count(sum(not result.passed for result in results), "file") + " failed")


def _tested(files: Iterable[Path], results: list[suite.FileResult]) -> Iterator[suite.FileResult]:
    """Each file's result as soon as it is there, so that its line shows how far the tests are."""
    actions = registry.specs_only()
    for file in files:
        results.append(suite.run_file(file, actions))
        yield results[-1]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


playbook.add_command(list_playbooks)
playbook.add_command(list_versions)
