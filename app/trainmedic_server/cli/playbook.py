"""``trainmedic playbook``: checks, explains and tests playbooks without a server, by the ``simulation``."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import click

from trainmedic_server import telemetry
from trainmedic_server.actions import registry
from trainmedic_server.adapters import file_inventory
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.catalog.library import Library
from trainmedic_server.catalog.schema import json_schema
from trainmedic_server.cli import exits
from trainmedic_server.domain.plain_text import json_text, visible
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.domain.topology import Topology
from trainmedic_server.errors import ConfigurationError, PayloadError
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.simulation import report, suite
from trainmedic_server.simulation.check import check as check_paths
from trainmedic_server.simulation.check import test_files
from trainmedic_server.simulation.explain import Explanation, read_alerts
from trainmedic_server.simulation.explain import explain as explain_alerts

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

    Each mistake is told with file, line and column. Ends with 1 where there is one.
    """
    checked = check_paths(_roots(paths), registry.specs_only())
    for problem in checked.problems:
        click.echo(visible(str(problem), keep="\n"))
    if checked.problems:
        raise exits.Failure(_count(len(checked.problems), "mistake"))
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


@playbook.command()
@click.argument("alert", metavar="ALERT.json", type=click.File("rb"))
@click.option(
    "--playbooks", "paths", metavar="PATH", multiple=True, type=click.Path(path_type=Path), help="Can be repeated."
)
@click.option(
    "--mode",
    type=click.Choice([mode.value for mode in Mode]),
    default=Mode.ENFORCE.value,
    show_default=True,
    help="The server's mode.",
)
@click.option(
    "--inventory",
    metavar="FILE",
    type=click.Path(path_type=Path),
    envvar="TRAINMEDIC_INVENTORY",
    help="Mapping from address to node name.",
)
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def explain(alert: BinaryIO, paths: Sequence[Path], mode: str, inventory: Path | None, output: str) -> None:
    """Say what an alert would lead to, and why.

    ALERT.json is an alert alone, or a delivery as Alertmanager posts it; - reads standard input.
    What only a server knows (earlier runs, pause, the breaker) is left out.
    """
    actions, clock = registry.specs_only(), SystemClock()
    library = Library(_roots(paths), actions)
    library.reload()
    for problem in library.problems:
        click.echo(visible(f"Not loaded: {problem}", keep="\n"), err=True)
    try:
        alerts = read_alerts(alert.read(), clock.now())
        topology = Topology(file_inventory.load(inventory)) if inventory else Topology()
    except (PayloadError, ConfigurationError) as error:
        raise exits.InvalidInput(f"{alert.name}: {error}" if isinstance(error, PayloadError) else str(error)) from error
    explanations = explain_alerts(library, actions, alerts, EngineLimits(mode=Mode(mode)), clock.now(), topology)
    if output == "json":
        members = [_plain(explanation) for explanation in explanations]
        click.echo(json_text(members, indent=2, default=str))
        return
    for line in report.explanations(explanations):
        click.echo(line)


@playbook.command()
@_paths
@click.option("--verbose", "-v", is_flag=True, help="Name the tests that passed too.")
def test(paths: Sequence[Path], verbose: bool) -> None:
    """Run the tests beside the playbooks, in virtual time.

    The tests of gpu.yaml are in gpu_test.yaml. Ends with 1 where one fails.
    """
    files = test_files(_roots(paths))
    if not files:
        raise exits.InvalidInput("There is no file of tests there; their names end in _test.yaml.")
    results: list[suite.FileResult] = []
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


def _roots(paths: Sequence[Path]) -> list[Path]:
    """The paths on the command line, else those of the setting."""
    if paths:
        return list(paths)
    setting = os.environ.get("TRAINMEDIC_PLAYBOOKS") or "playbooks"
    return [Path(part).expanduser() for part in setting.split(os.pathsep) if part]


def _plain(explanation: Explanation) -> dict[str, Any]:
    """An explanation for JSON, in which its labels stand for the alert."""
    members = {field.name: getattr(explanation, field.name) for field in dataclasses.fields(explanation)}
    members["alert"] = dict(explanation.alert.labels)
    members["steps"] = [dataclasses.asdict(step) for step in explanation.steps]
    return members


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
