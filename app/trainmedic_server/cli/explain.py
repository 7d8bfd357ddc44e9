"""``trainmedic playbook explain``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import click

from trainmedic_core.cli import exits
from trainmedic_core.cli.output import output_option, print_document
from trainmedic_server.actions import registry
from trainmedic_server.adapters import file_inventory
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.api.times import time_of
from trainmedic_server.catalog import modes_file
from trainmedic_server.cli import explained
from trainmedic_server.cli.client import Client, token_from_file
from trainmedic_server.cli.params import TimeParam
from trainmedic_server.cli.playbook_paths import (
    alert_map_option,
    inventory_option,
    loaded_alert_map,
    loaded_playbooks,
    mode_option,
    playbooks_option,
)
from trainmedic_server.domain.playbook import Mode
from trainmedic_server.domain.target_modes import TargetModes
from trainmedic_server.domain.topology import Topology
from trainmedic_server.engine import explanation
from trainmedic_server.errors import ConfigurationError, PayloadError
from trainmedic_server.ports.limits import EngineLimits


@click.command()
@click.argument("alert", metavar="ALERT.json", type=click.File("rb"))
@playbooks_option
@mode_option
@inventory_option
@click.option(
    "--modes",
    metavar="FILE",
    type=click.Path(path_type=Path),
    envvar="TRAINMEDIC_MODES",
    help="File with the mode of parts of the cluster.",
)
@click.option(
    "--at",
    type=TimeParam(),
    metavar="TIME",
    help="Judge the alert's age and end as of this time, or a duration before now.",
)
@alert_map_option
@click.option("--server", metavar="URL", help="Ask this server instead of reading files.")
@click.option("--token", metavar="TOKEN", envvar="TRAINMEDIC_TOKEN", help="Token for the server.")
@click.option("--test", "as_test", is_flag=True, help="Print a test file for 'playbook test'.")
@output_option()
def explain(
    alert: BinaryIO,
    paths: Sequence[Path],
    mode: str,
    inventory: Path | None,
    modes: Path | None,
    at: str | None,
    alert_map: Sequence[Path],
    server: str | None,
    token: str | None,
    as_test: bool,
    output: str,
) -> None:
    """Show what an alert would start, and why.

    ALERT.json is a webhook's body, Alertmanager's list (API or 'amtool alert query -o json'), a single alert, or a run
    of 'trainmedic history show RUN --output json'; - reads standard input. Without --server, state that only a server
    has (earlier runs, pauses, the breaker) is ignored.

    \b
    amtool alert query -o json | trainmedic playbook explain -
    trainmedic playbook explain alert.json --test > gpu-temperature-high_test.yaml
    """
    document = _document(alert)
    if server is not None:
        if paths:
            raise click.UsageError("--server uses its own playbooks; omit --playbooks")
        if alert_map and _is_given("alert_map"):
            raise click.UsageError("--server uses its own alert map; omit --alert-map")
        for name in ("mode", "modes", "inventory"):
            if _is_given(name):
                raise click.UsageError(f"--server uses its own {name}; omit --{name}")
        answer = _explain_by_server(server, token, document, at, as_test)
    else:
        answer = _explain_by_files(document, alert.name, paths, Mode(mode), inventory, modes, at, alert_map, as_test)
    if as_test:
        click.echo(answer["test"], nl=False)
    else:
        print_document(answer, output, explained.lines)


def _document(alert: BinaryIO) -> Any:
    try:
        return json.loads(alert.read())
    except (ValueError, RecursionError) as error:
        raise exits.InvalidInput(f"{alert.name}: not JSON: {error}") from error


def _explain_by_server(url: str, token: str | None, document: Any, at: str | None, as_test: bool) -> Any:
    client = Client(url, token or token_from_file())
    click.get_current_context().call_on_close(client.close)
    params = {**({"at": at} if at else {}), **({"test": "true"} if as_test else {})}
    return client.post("explain", document, params)


def _explain_by_files(
    document: Any,
    name: str,
    paths: Sequence[Path],
    mode: Mode,
    inventory: Path | None,
    modes: Path | None,
    at: str | None,
    alert_map: Sequence[Path],
    as_test: bool,
) -> Any:
    # These import FastAPI, which takes longer than the group's other commands run.
    from trainmedic_server.api import alert_list, explanations, given_alerts, test_text

    actions, moment = registry.specs_only(), _moment(at, SystemClock().now())
    library = loaded_playbooks(paths, actions)
    try:
        # `kept_back`: why Alertmanager does not send each alert.
        alerts, kept_back = given_alerts.read(document, moment), given_alerts.kept_back(document)
        topology = Topology(file_inventory.load(inventory)) if inventory else Topology()
        limits = EngineLimits(mode=mode, target_modes=modes_file.load(modes) if modes else TargetModes())
    except (PayloadError, ConfigurationError) as error:
        raise exits.InvalidInput(f"{name}: {error}" if isinstance(error, PayloadError) else str(error)) from error
    mapping = loaded_alert_map(alert_map)
    answers = explanation.alone(lambda _: library.all(), alerts, actions, limits, moment, topology, mapping)
    test = None
    if as_test:
        mapped = [mapping.apply(each).alert for each in alerts]
        test = test_text.write(explanation.explain_for_a_test(library.for_alert, mapped, actions, limits))
    names = alert_list.by_alertname(library)
    view = explanations.view(answers, names, moment, test=test, kept_back=kept_back)
    return view.model_dump(mode="json")


def _is_given(name: str) -> bool:
    """Return whether the flag is on the command line, not only its environment variable."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def _moment(at: str | None, now: datetime) -> datetime:
    try:
        return time_of(at, now) if at else now
    except ValueError as error:
        raise exits.InvalidInput(f"--at: {at!r} {error}") from error
