"""``trainmedic history``: lists runs as a table, JSON or CSV, tells one run's story, and follows new events.

How a run, a time or an event reads is in ``story``; how a table is laid out is in ``table``. The domain's
enums are imported because ``domain.run`` loads neither pydantic nor any other library of the server.
"""

from __future__ import annotations

import csv
import itertools
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

from trainmedic_server.cli import exits, story, table
from trainmedic_server.cli.client import Client, server_options
from trainmedic_server.cli.times import TimeParam
from trainmedic_server.domain.plain_text import csv_cell, json_text
from trainmedic_server.domain.run import Decision, Status

_PAGE = 1000  # items; the most that the server gives at once
# The members of an item, in the order of the server's own CSV. The model that names them is the server's
# (`server.views.HistoryItem`), and importing it would load pydantic.
_COLUMNS = (
    "run_id", "timestamp", "alert_name", "alert_labels", "playbook", "target", "node", "gpu", "job", "mode", "status",
    "decision", "action_taken", "success", "message", "duration_ms", "touched", "owes_undo", "undo_error", "undone_at",
)  # fmt: skip
_HEADER = ("RUN", "TIME", "ALERT", "PLAYBOOK", "TARGET", "STATUS", "WHAT")
# Fixed while following, where the rows to come are not known; the last column takes what is left.
_WIDTHS = (36, 20, 24, 28, 26, 17, 0)
_LONGEST_PAUSE_SECONDS = 30.0

Item = Mapping[str, Any]


def _choice(option: str, metavar: str, values: Sequence[str]) -> Callable[[Any], Any]:
    """An option that takes one of `values`, which its help lists."""
    return click.option(option, type=click.Choice(values), metavar=metavar, help=f"One of {', '.join(values)}.")


_FILTERS = (
    click.option("--alert", "alertname", metavar="NAME", help="The alert's name."),
    click.option("--playbook", metavar="NAME"),
    _choice("--status", "STATUS", [status.value for status in Status]),
    _choice("--decision", "REASON", [decision.value for decision in Decision]),
    click.option("--node", metavar="NAME"),
    click.option("--gpu", metavar="ID"),
    click.option("--job", metavar="NAME"),
    click.option("--since", type=TimeParam(), metavar="TIME", help="From then on: a time, or how long ago (90m, 7d)."),
    click.option("--until", type=TimeParam(), metavar="TIME", help="Before then."),
    click.option("--owes-undo", flag_value="true", default=None, help="Closed runs that still owe an undo."),
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
    conditions = {name: value for name, value in filters.items() if value is not None}
    if follow:
        if output == "csv":
            raise click.UsageError("--follow goes with --output table or json")
        _follow(client, conditions, limit, as_json=output == "json")
        return
    items = _items(client, conditions, None if everything else limit)
    {"table": _print_table, "json": _print_json, "csv": _print_csv}[output](items)


@history.command()
@click.argument("run_id", metavar="RUN")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@server_options
def show(client: Client, run_id: str, output: str) -> None:
    """Tell the whole story of one run: alerts, decision, steps, undo, and what happened when."""
    run = client.get(f"history/{run_path(run_id)}")
    if output == "json":
        click.echo(json_text(run, indent=2))
        return
    for line in story.lines(run):
        click.echo(line)


def run_path(run_id: str) -> str:
    """The id as a part of a path. Raises UsageError where it cannot be a run's id."""
    if not run_id or not run_id.isascii() or not all(letter.isalnum() or letter in "-_" for letter in run_id):
        raise click.UsageError(f"{run_id!r} is not the id of a run")
    return run_id


def _items(client: Client, conditions: Mapping[str, str], limit: int | None) -> Iterator[Item]:
    """The newest items that meet the conditions, page by page; all of them where `limit` is None."""
    cursor, left = None, limit
    while left is None or left > 0:
        size = _PAGE if left is None else min(left, _PAGE)
        page = client.get("history", {**conditions, "limit": size} | ({"cursor": cursor} if cursor else {}))
        yield from page["items"]
        cursor = page["next"]
        left = None if left is None else left - len(page["items"])
        if not cursor:
            return


def _print_table(items: Iterator[Item]) -> None:
    lines = [_cells(item) for item in items]
    if not lines:
        click.echo("No run matches.", err=True)
        return
    for line in table.rows(_HEADER, lines, _terminal_width()):
        click.echo(line)


def _cells(item: Item) -> tuple[object, ...]:
    """An item's row. The last cell says why nothing began, or what was done and how it ended."""
    reason = item["decision"] if item["status"] == Status.NOT_STARTED else item.get("action_taken")
    summary = ": ".join(part for part in (reason, item.get("message")) if part) or "-"
    columns = ("alert_name", "playbook", "target", "status")
    return (item["run_id"], story.moment(item["timestamp"]), *(item[column] for column in columns), summary)


def _print_json(items: Iterator[Item]) -> None:
    """One JSON array, written as it arrives."""
    between = "[\n"
    for item in items:
        click.echo(between + json_text(item), nl=False)
        between = ",\n"
    click.echo("[]" if between == "[\n" else "\n]")


def _print_csv(items: Iterator[Item]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for item in items:
        writer.writerow([csv_cell(item.get(column)) for column in _COLUMNS])


def _follow(client: Client, conditions: Mapping[str, str], limit: int, as_json: bool) -> None:
    """Print the newest runs, oldest first, and then every event of runs that match."""
    items = {item["run_id"]: item for item in reversed(list(_items(client, conditions, limit)))}
    if not as_json:
        click.echo(table.fit(_HEADER, _WIDTHS, _terminal_width()))
    for item in items.values():
        row = [table.plain(cell) for cell in _cells(item)]
        click.echo(json_text(item) if as_json else table.fit(row, _WIDTHS, _terminal_width()))
    for event in _endless_events(client):
        about = _item_of(client, event, items)
        if conditions and (about is None or not _matches(about, conditions)):
            continue
        click.echo(json_text(event) if as_json else _event_line(event, about))


def _endless_events(client: Client) -> Iterator[dict[str, Any]]:
    """Events for ever: a lost connection is resumed at the event where it broke."""
    last_id: str | None = None
    for reconnections in itertools.count():
        try:
            for message in client.events(last_id):
                last_id = message.id or last_id
                event = json.loads(message.data)
                if isinstance(event, dict):
                    yield event
        except exits.Unreachable as error:
            if last_id is None and reconnections == 0:
                raise
            click.echo(f"{table.plain(error.message.splitlines()[0])} Trying again.", err=True)
        time.sleep(min(2.0 ** min(reconnections, 5), _LONGEST_PAUSE_SECONDS))


def _item_of(client: Client, event: Mapping[str, Any], items: dict[str, Item]) -> Item | None:
    """The item of the run that an event is about, from `items` or else from the server; None where there is none."""
    run_id = event.get("run_id")
    if not run_id:
        return None
    if run_id not in items:
        try:
            items[run_id] = client.get(f"history/{run_path(run_id)}")
        except exits.UnknownName:
            return None
    return items[run_id]


def _matches(item: Item, conditions: Mapping[str, str]) -> bool:
    """Whether a run meets the conditions; those on what changes while it runs (its status) are not looked at."""
    members = {"alertname": "alert_name"}
    steady = (name for name in conditions if name not in ("status", "since", "until", "owes_undo"))
    return all(item.get(members.get(name, name)) == conditions[name] for name in steady)


def _event_line(event: Mapping[str, Any], item: Item | None) -> str:
    about = f"{table.plain(item['playbook'])} {table.plain(item['target'])}  " if item else ""
    run_id = table.plain(event.get("run_id")).ljust(36)
    return f"{run_id}  {story.moment(event.get('at'))}  {about}{story.describe(event)}"


def _terminal_width() -> int:
    """The terminal's width; practically unlimited where the output goes to a file or another program."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
