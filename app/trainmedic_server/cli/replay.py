"""``trainmedic playbook replay``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from trainmedic_core import duration, words
from trainmedic_core.cli import exits
from trainmedic_core.cli.output import output_option, print_document
from trainmedic_core.plain_text import visible
from trainmedic_core.problems import FileProblem
from trainmedic_server.actions import registry
from trainmedic_server.adapters import file_inventory
from trainmedic_server.adapters.system_clock import SystemClock
from trainmedic_server.api.times import time_of
from trainmedic_server.catalog.library import Library
from trainmedic_server.cli import listing
from trainmedic_server.cli.client import Client, server_options
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
from trainmedic_server.domain.topology import Topology
from trainmedic_server.errors import ConfigurationError
from trainmedic_server.ports.alert_map import NO_ALERT_MAP
from trainmedic_server.ports.limits import EngineLimits
from trainmedic_server.simulation import recorded, replay_report
from trainmedic_server.simulation.recorded import Recorded
from trainmedic_server.simulation.replay import Replay, ReplaySettings
from trainmedic_server.simulation.replay_spool import ReplaySpool

_HISTORY = "history"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MOST_PROBLEMS = 20


class _DurationParam(click.ParamType[timedelta]):
    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        try:
            return duration.check_back(duration.parse(str(value)))
        except ValueError as error:
            self.fail(str(error))


@click.command(name="replay")
@click.option(
    "--from",
    "sources",
    metavar="history|FILE",
    multiple=True,
    required=True,
    help="'history' reads the server's alerts and runs. A file has one of its alerts or runs per line. Repeatable.",
)
@click.option(
    "--since", type=TimeParam(), metavar="TIME", help="Only alerts first heard since. Default with history: 30d."
)
@playbooks_option
@alert_map_option
@inventory_option
@mode_option
@click.option("--max-age", type=_DurationParam(), default="15m", show_default=True, help="The server's maximum age.")
@click.option(
    "--gpus-per-node", type=click.IntRange(min=1), metavar="NUMBER", help="To count GPU-hours of nodes and jobs."
)
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    metavar="NUMBER",
    help="Number of nodes that the server knows, for the breaker.",
)
@click.option(
    "--breaker-closes-after",
    type=_DurationParam(),
    default="1h",
    show_default=True,
    metavar="DURATION",
    help="Assume that a person closes an open breaker after this time.",
)
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Most differences shown.")
@output_option()
@server_options
def replay(
    client: Client,
    sources: Sequence[str],
    since: str | None,
    paths: Sequence[Path],
    alert_map: Sequence[Path],
    inventory: Path | None,
    mode: str,
    max_age: timedelta,
    gpus_per_node: int | None,
    nodes: int | None,
    breaker_closes_after: timedelta,
    limit: int,
    output: str,
) -> None:
    """Show what playbooks would have decided on the alerts that came, next to what was decided.

    Nothing is changed. Guards, matchers and targets are those of the server. A decision that depends on something not
    recorded is shown as 'not known', or with the possible ones.

    \b
    trainmedic playbook replay --from history --since 30d --playbooks new/
    trainmedic alerts --all --output json > alerts.json
    trainmedic history --all --output json > runs.json
    trainmedic playbook replay --from alerts.json --from runs.json --gpus-per-node 8
    """
    now = SystemClock().now()
    library = loaded_playbooks(paths, registry.specs_only())
    if since is None and _HISTORY in sources:
        since = "30d"
    try:
        begin = time_of(since, now) if since else None
    except ValueError as error:
        raise exits.InvalidInput(f"--since: {since!r} {error}") from error
    try:
        settings = ReplaySettings(
            EngineLimits(mode=Mode(mode), max_age=max_age),
            Topology(file_inventory.load(inventory)) if inventory else Topology(),
            loaded_alert_map(alert_map) if alert_map else NO_ALERT_MAP,
            gpus_per_node,
            nodes or 0,
            breaker_closes_after,
            begin,
        )
        with ReplaySpool() as spool:
            replayed = Replay(library, registry.specs_only(), settings, spool)
            wrong = _feed(replayed, _recorded_items(client, sources, begin, library))
            result = replayed.result()
    except ConfigurationError as error:
        raise exits.InvalidInput(str(error)) from error
    print_document(result.as_data(limit), output, replay_report.lines)
    if wrong:
        raise exits.Failure(f"{words.count(wrong, 'line')} could not be read")


def _recorded_items(
    client: Client, sources: Sequence[str], begin: datetime | None, library: Library
) -> Iterator[Recorded | FileProblem]:
    for source in dict.fromkeys(sources):
        if source == _HISTORY:
            yield from _of_server(client, begin, library)
        else:
            yield from recorded.read_file(Path(source))


def _of_server(client: Client, begin: datetime | None, library: Library) -> Iterator[Recorded]:
    """Yield the alerts since `begin`, and the runs since a guard's longest period before that."""
    assert begin is not None
    guards = [playbook.definition.guards for playbook in library.all()]
    spans = [span for each in guards for span in (each.cooldown, each.max_runs and each.max_runs.per) if span]
    since = begin - min(max(spans, default=timedelta()), begin - _EPOCH)
    for path, start in (("history", since), ("alerts", begin)):
        for item in listing.items(client, path, {"since": start.isoformat()}, None):
            try:
                yield recorded.of_item(item)
            except ValueError as error:
                raise exits.Failure(f"{client.url} sent an item of {path} that cannot be read: {error}") from error


def _feed(replayed: Replay, items: Iterable[Recorded | FileProblem]) -> int:
    """Print the first problems, and return the number of all."""
    problems = 0
    for item in items:
        if not isinstance(item, FileProblem):
            replayed.take(item)
            continue
        problems += 1
        if problems <= _MOST_PROBLEMS:
            click.echo(visible(str(item)), err=True)
    return problems
