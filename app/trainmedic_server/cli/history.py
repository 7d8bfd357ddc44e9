"""``trainmedic history``."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click

from trainmedic.wire.backoff import Backoff
from trainmedic_core import words
from trainmedic_core.cli import exits, groups, table
from trainmedic_core.cli.choice import NearestChoice
from trainmedic_core.cli.output import output_option, print_document, with_options
from trainmedic_core.plain_text import json_text
from trainmedic_core.target import PARTS
from trainmedic_server.cli import listing, story
from trainmedic_server.cli.client import Client, server_options, unknown_job_note, unknown_playbook_note
from trainmedic_server.cli.params import TimeParam
from trainmedic_server.domain.run import FindableDecision, Status
from trainmedic_server.presentation import rows, runs, times

# The members of an item, in the order of the server's CSV. Importing their model (`api.views.HistoryItem`) would load
# pydantic.
_COLUMNS = (
    "run_id", "timestamp", "alert_name", "alert_labels", "playbook", "target", *PARTS, "mode", "status",
    "decision", "action_taken", "success", "message", "duration_ms", "touched", "owes_undo", "undo_error", "undone_at",
    "waiting_on", "deadline", "approved_by", "decided_at",
    "started_by", "repeats", "parent", "batch", "group", "original_alert_name", "original_labels", "version",
    "also",
)  # fmt: skip
_HEADER = ("WHEN", "RUN", "ALERT", "PLAYBOOK", "TARGET", "RESULT", "TOOK", "WHAT")
_MOST_FOLDED = 20  # most decisions read for a row: equal ones share it
# Fixed while following, because later rows are unknown. The last column takes the rest.
_WIDTHS = (6, 8, 20, 20, 22, 15, 11, 0)
_MOST_KEPT = 1000  # most runs in memory while following, to not request one for each event; some 10 KB each
_PERHAPS_RUN = re.compile(r"[0-9a-f-]{6,36}")
_LONGEST_PAUSE_SECONDS = 30.0  # before the next connection

Item = listing.Item


def _once(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> str | None:
    if len(values) > 1:
        raise click.BadParameter("is given more than once", ctx=ctx, param=param)
    return values[0] if values else None


def _name_option(*names: str, help: str = "") -> Callable[[Any], Any]:
    return click.option(*names, multiple=True, metavar="NAME", help=help)


def _choice_option(option: str, metavar: str, values: Sequence[str]) -> Callable[[Any], Any]:
    help = f"One of {', '.join(values)}."
    return click.option(option, type=NearestChoice(values), metavar=metavar, multiple=True, help=help)


def _time_option(option: str, help: str) -> Callable[[Any], Any]:
    return click.option(option, type=TimeParam(), metavar="TIME", multiple=True, callback=_once, help=help)


_FILTERS = (
    _name_option("--alert", "alertname", help="The alert's name. Repeatable, like every option with NAME."),
    _name_option("--playbook"),
    _choice_option("--status", "STATUS", [status.value for status in Status]),
    _choice_option("--decision", "REASON", [decision.value for decision in FindableDecision]),
    _name_option("--node", help="The target's node, or one that a run on a job touched."),
    _name_option("--gpu", help="Alone, or with its node: node-1/0."),
    _name_option("--job"),
    _name_option("--target", help="Show only runs on this target (job:llm-1)."),
    _name_option("--by", help="Who approved, rejected, cancelled or undid it."),
    _time_option("--since", "Start: a time, or a duration before now (90m, 7d)."),
    _time_option("--until", "End: a time, or a duration before now."),
    click.option("--open", flag_value="true", default=None, help="Show only open runs."),
    click.option("--parent", metavar="RUN", help="Members of this group, by its run's full ID."),
    click.option("--owes-undo", flag_value="true", default=None, help="Show only closed runs with a pending undo."),
)


class _HistoryGroup(click.Group):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if _PERHAPS_RUN.fullmatch(args[0]):
            ctx.fail(f"No such command {args[0]!r}; to see a run: trainmedic history show {args[0]}")
        return super().resolve_command(ctx, args)


@click.group(cls=_HistoryGroup, invoke_without_command=True)
@with_options(_FILTERS)
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Maximum number of rows.")
@click.option("--each", is_flag=True, help="One row per decision, without folding equal ones.")
@click.option("--all", "everything", is_flag=True, help="Show all matches.")
@click.option("--output", type=NearestChoice(["table", "json", "csv"]), default="table", show_default=True)
@click.option("--follow", "-f", is_flag=True, help="Then show new events until interrupted.")
@server_options
def history(
    client: Client,
    limit: int,
    each: bool,
    everything: bool,
    output: str,
    follow: bool,
    **filters: Any,
) -> None:
    """Show runs and decisions not to start one, newest first.

    \b
    trainmedic history --status failed --status rejected --since 1d
    trainmedic history --job llm-1 --output csv --all > llm-1.csv
    trainmedic history show RUN
    """
    if click.get_current_context().invoked_subcommand is not None:
        groups.refuse_options("the list of runs", "output")
        return
    conditions = {name: value for name, value in filters.items() if value}
    if follow:
        if output == "csv":
            raise click.UsageError("--follow needs --output table or json")
        _follow(client, conditions, limit, as_json=output == "json")
        return
    most = None if everything else limit
    if output == "table":
        _print_table(client, conditions, most, each)
    else:
        items = listing.items(client, "history", conditions, most)
        listing.write_json(items) if output == "json" else listing.write_csv(items, _COLUMNS)


@history.command()
@click.argument("run_id", metavar="RUN")
@click.option(
    "--job", metavar="NAME", help="The run's job; RUN must then be complete. Required with a token limited to jobs."
)
@output_option()
@server_options
def show(client: Client, run_id: str, output: str, job: str | None) -> None:
    """Show one run in full: alerts, decision, steps, undo and timeline."""
    path = f"history/{run_path(run_id)}"
    run = client.get(listing.job_path(job, path) if job else path)
    print_document(run, output, story.lines)


def run_path(run_id: str) -> str:
    if not run_id or not run_id.isascii() or not all(letter.isalnum() or letter in "-_" for letter in run_id):
        raise click.UsageError(f"{run_id!r} is not the id of a run")
    return run_id


def _print_table(client: Client, conditions: Mapping[str, Any], limit: int | None, each: bool) -> None:
    at = datetime.now(UTC).isoformat()
    if each:
        shown = rows.folded(list(listing.items(client, "history", conditions, limit)), None, "timestamp")
    else:
        shown = _folded_rows(client, conditions, limit)
    if not shown:
        click.echo("No run matches.", err=True)
        for doubt in filter(None, _unknown_names(client, conditions)):
            click.echo(doubt, err=True)
        return
    table.show(_HEADER, [_cells(row, at) for row in shown[:limit]])


def _unknown_names(client: Client, conditions: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note on each named job and playbook, "" if known. Skip those that fail."""
    for note_on, option in ((unknown_job_note, "job"), (unknown_playbook_note, "playbook")):
        for name in conditions.get(option, ()):
            with contextlib.suppress(exits.CommandError):
                yield note_on(client, name)


def _folded_rows(client: Client, conditions: Mapping[str, Any], limit: int | None) -> list[rows.Row]:
    most = None if limit is None else limit * _MOST_FOLDED
    page_size = listing.PAGE if limit is None else min(max(limit, 100), listing.PAGE)
    items: list[Item] = []
    for item in listing.items(client, "history", conditions, most, page_size):
        items.append(item)
        if limit is not None and len(items) % page_size == 0:
            shown = rows.folded(items, rows.refusal_key, "timestamp", is_cut=True)
            if len(shown) > limit:
                return shown[:limit]
    return rows.folded(items, rows.refusal_key, "timestamp", is_cut=len(items) == most)


def _cells(row: rows.Row, at: str) -> tuple[object, ...]:
    item = row.item
    targets = {each["target"] for each in (item, *row.alike)}
    whose = f"{item['decision']}, {row.whose_reason}: {item['message']}" if row.whose_reason else ""
    return (
        times.age(item["timestamp"], at),
        f"×{row.times}" if row.alike else runs.short_id(item["run_id"]),
        item["alert_name"],
        item["playbook"],
        f"{len(targets)}{'+' if row.has_more else ''} targets" if len(targets) > 1 else item["target"],
        runs.status_text(item),
        runs.run_length(item) or "-",
        whose or runs.outcome_text(item),
    )


def _follow(client: Client, conditions: Mapping[str, Any], limit: int, as_json: bool) -> None:
    items = {item["run_id"]: item for item in reversed(list(listing.items(client, "history", conditions, limit)))}
    at = datetime.now(UTC).isoformat()
    if not as_json:
        click.echo(table.fit(_HEADER, _WIDTHS, table.width()))
    for item in items.values():
        row = [words.plain(cell) for cell in _cells(rows.Row(item), at)]
        click.echo(json_text(item) if as_json else table.fit(row, _WIDTHS, table.width()))
    for event in _endless_events(client):
        kept = items.get(event.get("run_id"))
        if kept is not None and "node" in conditions and not _matches(kept, conditions):
            del items[kept["run_id"]]  # it may have touched further nodes since
        about = _item_of(client, event, items)
        if conditions and (about is None or not _matches(about, conditions)):
            continue
        click.echo(json_text(event) if as_json else _event_line(event, about))


def _endless_events(client: Client) -> Iterator[dict[str, Any]]:
    last_id: str | None = None
    pauses = Backoff(1.0, _LONGEST_PAUSE_SECONDS)
    for reconnections in itertools.count():
        try:
            for message in client.events(last_id):
                pauses.reset()
                last_id = message.id or last_id
                event = json.loads(message.data) if message.data else None
                if isinstance(event, dict):
                    yield event
        except exits.Unreachable as error:
            if last_id is None and reconnections == 0:
                raise
            click.echo(f"{words.plain(error.message.splitlines()[0])} Trying again.", err=True)
        time.sleep(pauses.next())


def _item_of(client: Client, event: Mapping[str, Any], items: dict[str, Item]) -> Item | None:
    run_id = event.get("run_id")
    if not run_id:
        return None
    if run_id not in items:
        while len(items) >= _MOST_KEPT:
            del items[next(iter(items))]
        try:
            items[run_id] = client.get(f"history/{run_path(run_id)}")
        except exits.UnknownName:
            return None
    return items[run_id]


def _matches(item: Item, conditions: Mapping[str, Any]) -> bool:
    """Check only conditions that hold for a whole run, so not its status or operators."""
    steady = ("playbook", "decision", "job", "target")
    same = all(item.get(name) in conditions[name] for name in steady if name in conditions)
    alertnames = {item.get("alert_name"), item.get("original_alert_name")}
    named = "alertname" not in conditions or not alertnames.isdisjoint(conditions["alertname"])
    nodes = {item.get("node"), *item.get("touched", ())}
    on_node = "node" not in conditions or not nodes.isdisjoint(conditions["node"])
    gpus = {item.get("gpu"), f"{item.get('node')}/{item.get('gpu')}"}
    on_gpu = "gpu" not in conditions or any(gpu.removeprefix("gpu:") in gpus for gpu in conditions["gpu"])
    parent, group = str(item.get("parent") or ""), conditions.get("parent", "")
    is_member = parent.startswith(group) or parent.endswith(group)  # the API takes a part of the ID, too
    return same and named and on_node and on_gpu and is_member


def _event_line(event: Mapping[str, Any], item: Item | None) -> str:
    about = f"{words.plain(item['playbook'])} {words.plain(item['target'])}  " if item else ""
    run_id = runs.short_id(event.get("run_id")).ljust(8)
    return f"{times.stamp(event.get('at'))}  {run_id}  {about}{story.describe(event)}"
