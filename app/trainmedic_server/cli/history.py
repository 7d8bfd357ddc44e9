"""``trainmedic history``: what was done, as a table, JSON or CSV; one run's whole story; following."""

from __future__ import annotations

import csv
import itertools
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import click

from trainmedic_server.cli import exits, story, table
from trainmedic_server.cli.client import Client, server_options

# The server's words, written out: to take them from the domain would load the server's libraries.
STATUSES = (
    "running",
    "waiting",
    "awaiting_approval",
    "succeeded",
    "failed",
    "cancelled",
    "rejected",
    "observed",
    "not_started",
)
DECISIONS = (
    "started",
    "joined",
    "duplicate",
    "cooldown",
    "rate_limited",
    "concurrency_limited",
    "breaker_open",
    "paused",
    "observe_only",
    "stale",
    "target_unknown",
    "target_ambiguous",
    "target_busy",
)
_PAGE = 1000
_AGO = re.compile(r"(\d+(ms|[ywdhms]))+")
_COLUMNS = (
    "run_id",
    "timestamp",
    "alert_name",
    "alert_labels",
    "playbook",
    "target",
    "node",
    "gpu",
    "job",
    "mode",
    "status",
    "decision",
    "action_taken",
    "success",
    "message",
    "duration_ms",
)
_WIDTHS = (36, 20, 24, 28, 26, 17)
_HEADER = ("RUN", "TIME", "ALERT", "PLAYBOOK", "TARGET", "STATUS", "WHAT")
_LONGEST_PAUSE_SECONDS = 30.0


class _Moment(click.ParamType[str]):
    """A time, or how long ago it was as a Prometheus duration, which the server subtracts from its own clock."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if _AGO.fullmatch(value):
            return str(value)
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is neither a time (2026-01-31T12:00:00Z) nor how long ago it was (90m, 7d)")
        return moment.astimezone(UTC).isoformat()  # one without a zone is in the zone of this machine


_FILTERS = (
    click.option("--alert", "alertname", metavar="NAME", help="The alert's name."),
    click.option("--playbook", metavar="NAME"),
    click.option(
        "--status",
        type=click.Choice(STATUSES),
        metavar="STATUS",
        help=f"One of {', '.join(STATUSES)}.",
    ),
    click.option(
        "--decision",
        type=click.Choice(DECISIONS),
        metavar="REASON",
        help=f"One of {', '.join(DECISIONS)}.",
    ),
    click.option("--node", metavar="NAME"),
    click.option("--gpu", metavar="ID"),
    click.option("--job", metavar="NAME"),
    click.option("--since", type=_Moment(), metavar="TIME", help="From then on: a time, or how long ago (90m, 7d)."),
    click.option("--until", type=_Moment(), metavar="TIME", help="Before then."),
)


def _filters(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_FILTERS):
        command = option(command)
    return command


@click.group(invoke_without_command=True)
@_filters
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="At most so many runs.")
@click.option("--all", "everything", is_flag=True, help="All that match, however many.")
@click.option("--output", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
@click.option("--follow", "-f", is_flag=True, help="Then show what happens, until interrupted.")
@server_options
def history(
    client: Client,
    limit: int,
    everything: bool,
    output: str,
    follow: bool,
    **filters: str | None,
) -> None:
    """Show what was done, and why: runs and decisions not to start one, newest first.

    \b
    trainmedic history --status failed --since 1d
    trainmedic history --job llm-1 --output csv --all > llm-1.csv
    trainmedic history show 019c1415-6c05-7c11-9a0d-6f1d2e3c4b5a
    """
    if click.get_current_context().invoked_subcommand is not None:
        return
    wanted = {name: value for name, value in filters.items() if value is not None}
    if follow:
        if output == "csv":
            raise click.UsageError("--follow goes with --output table or json")
        _follow(client, wanted, limit, as_json=output == "json")
        return
    items = _items(client, wanted, None if everything else limit)
    {"table": _print_table, "json": _print_json, "csv": _print_csv}[output](items)


@history.command()
@click.argument("run_id", metavar="RUN")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@server_options
def show(client: Client, run_id: str, output: str) -> None:
    """Tell the whole story of one run: alerts, decision, steps, undo, and what happened when."""
    run = client.get(f"history/{run_path(run_id)}")
    if output == "json":
        click.echo(json.dumps(run, indent=2, ensure_ascii=False))
        return
    for line in story.tell(run):
        click.echo(line)


def run_path(run_id: str) -> str:
    """A run's id as a part of a path; refused where it cannot be one."""
    if not run_id or not run_id.isascii() or not all(letter.isalnum() or letter in "-_" for letter in run_id):
        raise click.UsageError(f"{run_id!r} is not the id of a run")
    return run_id


def _items(client: Client, wanted: Mapping[str, str], limit: int | None) -> Iterator[Mapping[str, Any]]:
    cursor, left = None, limit
    while left is None or left > 0:
        size = _PAGE if left is None else min(left, _PAGE)
        page = client.get("history", {**wanted, "limit": size} | ({"cursor": cursor} if cursor else {}))
        yield from page["items"]
        cursor = page["next"]
        left = None if left is None else left - len(page["items"])
        if not cursor:
            return


def _print_table(items: Iterator[Mapping[str, Any]]) -> None:
    lines = [_cells(item) for item in items]
    if not lines:
        click.echo("No run matches.", err=True)
        return
    for line in table.rows(_HEADER, lines, _terminal_width()):
        click.echo(line)


def _cells(item: Mapping[str, Any]) -> tuple[object, ...]:
    return (
        item["run_id"],
        story.moment(item["timestamp"]),
        item["alert_name"],
        item["playbook"],
        item["target"],
        item["status"],
        _what(item),
    )


def _what(item: Mapping[str, Any]) -> str:
    """Why nothing began; else what was done and the closing message."""
    if item["status"] == "not_started":
        parts = [item["decision"], item.get("message")]
    else:
        parts = [item.get("action_taken"), item.get("message")]
    return ": ".join(part for part in parts if part) or "-"


def _print_json(items: Iterator[Mapping[str, Any]]) -> None:
    """One JSON array, written as it arrives."""
    between = "[\n"
    for item in items:
        click.echo(between + json.dumps(item, ensure_ascii=False), nl=False)
        between = ",\n"
    click.echo("[]" if between == "[\n" else "\n]")


def _print_csv(items: Iterator[Mapping[str, Any]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for item in items:
        writer.writerow([_csv_cell(item.get(column)) for column in _COLUMNS])


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False, sort_keys=True)
    # A spreadsheet would run a label value that looks like a formula.
    return f"'{value}" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def _follow(client: Client, wanted: Mapping[str, str], limit: int, as_json: bool) -> None:
    """Print the newest runs, oldest first, and then every event of runs that match."""
    recent = list(_items(client, wanted, limit))[::-1]
    if as_json:
        for item in recent:
            click.echo(json.dumps(item, ensure_ascii=False))
    else:
        click.echo(table.fit(_HEADER, [*_WIDTHS, 0], _terminal_width()))
        for item in recent:
            click.echo(table.fit([table.plain(cell) for cell in _cells(item)], [*_WIDTHS, 0], _terminal_width()))
    known: dict[str, Mapping[str, Any]] = {item["run_id"]: item for item in recent}
    for event in _endless(client):
        about = _item_of(client, event, known)
        if wanted and (about is None or not _matches(about, wanted)):
            continue
        click.echo(json.dumps(event, ensure_ascii=False) if as_json else _event_line(event, about))


def _endless(client: Client) -> Iterator[dict[str, Any]]:
    """Events for ever: a lost connection is taken up again where it broke."""
    last_id: str | None = None
    for lost in itertools.count():
        try:
            for message in client.events(last_id):
                last_id = message.id or last_id
                event = json.loads(message.data)
                if isinstance(event, dict):
                    yield event
        except exits.Unreachable as error:
            if last_id is None and lost == 0:
                raise
            click.echo(f"{error.message.splitlines()[0]} Trying again.", err=True)
        time.sleep(min(2.0 ** min(lost, 5), _LONGEST_PAUSE_SECONDS))


def _item_of(client: Client, event: Mapping[str, Any], known: dict[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    run_id = event.get("run_id")
    if not run_id:
        return None
    if run_id not in known:
        try:
            known[run_id] = client.get(f"history/{run_path(run_id)}")
        except exits.UnknownName:
            return None
    return known[run_id]


def _matches(item: Mapping[str, Any], wanted: Mapping[str, str]) -> bool:
    """Whether a run is among those asked for; what changes while it runs (its status) is not looked at."""
    members = {"alertname": "alert_name"}
    steady = (name for name in wanted if name not in ("status", "since", "until"))
    return all(item.get(members.get(name, name)) == wanted[name] for name in steady)


def _event_line(event: Mapping[str, Any], item: Mapping[str, Any] | None) -> str:
    about = f"{table.plain(item['playbook'])} {table.plain(item['target'])}  " if item else ""
    run_id = table.plain(event.get("run_id")).ljust(36)
    return f"{run_id}  {story.moment(event.get('at'))}  {about}{story.describe(event)}"


def _terminal_width() -> int:
    """The terminal's; unlimited where the output goes to a file or another program."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
