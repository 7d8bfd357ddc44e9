"""``trainmedic pause``, ``pauses`` and ``resume``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import click

from trainmedic_core import words
from trainmedic_core.cli import table
from trainmedic_core.cli.output import output_option, print_document
from trainmedic_server.cli.client import Client, server_options
from trainmedic_server.cli.params import TimeParam, labels_option
from trainmedic_server.presentation import times

_HEADER = ("ID", "SCOPE", "STATE", "UNTIL", "BY", "WHY")


@click.command()
@click.option("--playbook", metavar="NAME", help="Only runs of this playbook, or a pattern such as gpu-*.")
@click.option("--node", metavar="NAME", help="Only runs that touch this node, including those on its jobs.")
@click.option("--job", metavar="NAME", help="Only runs that touch this job.")
@labels_option("Only runs for alerts with this label. Repeatable.")
@click.option("--for", "length", metavar="DURATION", help="Duration (2h). Default: until 'trainmedic resume'.")
@click.option(
    "--starts", type=TimeParam(ago=False), metavar="TIME", help="Start, for a maintenance window. Default: now."
)
@click.option("--every", metavar="DURATION", help="Repeat at this interval, such as 7d; needs --for.")
@click.option("--note", default="", metavar="TEXT", help="Reason, shown with the pause.")
@click.option(
    "--observe-only", is_flag=True, help="With --playbook: start its runs, but only record what they would do."
)
@server_options
def pause(client: Client, length: str | None, observe_only: bool, **wanted: Any) -> None:
    """Stop new repairs until 'trainmedic resume', or some, or for a while. Undos still run.

    \b
    trainmedic pause --node node-7 --for 2h --note "new fans"
    trainmedic pause --label rack=r3 --starts 2026-02-01T06:00:00Z --for 4h --every 7d
    """
    given = {name: value for name, value in wanted.items() if value}
    if length:
        given["for"] = length
    if not observe_only:
        made = client.post("pause", given)
        if given:
            click.echo(f"{_scope(made['pause'])}: {_state(made['pause'])}, until {_until(made['pause'])}")
        click.echo(switches_text(made))
        if made.get("warning"):
            click.echo(f"Warning: {words.plain(made['warning'])}", err=True)
        return
    playbook = given.pop("playbook", None)
    if playbook is None or given.keys() - {"for", "note"}:
        raise click.UsageError("--observe-only needs --playbook, and allows only --for and --note")
    client.post(f"playbooks/{quote(playbook, safe='')}/mode", {"mode": "observe", **given})
    click.echo(f"{words.plain(playbook)} only observes. 'trainmedic pauses' shows until when.")


@click.command()
@output_option("table")
@server_options
def pauses(client: Client, output: str) -> None:
    """Show present and future pauses."""
    items = client.get("pauses")["items"]
    print_document(items, output, _list)


def _list(items: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    cells = [
        (item.get("id"), _scope(item), _state(item), _until(item), item.get("by"), item.get("note")) for item in items
    ]
    return table.rows(_HEADER, cells, 160) if cells else ["Nothing is paused."]


@click.command()
@click.argument("pause_id", metavar="[ID]", required=False)
@click.option("--playbook", metavar="NAME", help="End the pause with this scope.")
@click.option("--node", metavar="NAME")
@click.option("--job", metavar="NAME")
@labels_option()
@click.option("--breaker", is_flag=True, help="Close the breaker, and restart its count.")
@server_options
def resume(client: Client, pause_id: str | None, breaker: bool, **scope: Any) -> None:
    """Allow new repairs again. Alerts in the pause are not made up for.

    Without ID, scope or --breaker, every active pause ends; future windows stay.
    """
    given = {name: value for name, value in scope.items() if value}
    if pause_id:
        given["id"] = pause_id
    click.echo(switches_text(client.post("resume", {"breaker": breaker, **given})))


def switches_text(switches: Mapping[str, Any]) -> str:
    paused = "paused" if switches.get("paused") else "not paused"
    if switches.get("paused_by"):
        paused += f" by {words.plain(switches['paused_by'])} since {times.stamp(switches.get('paused_at'))}"
    parts = [text for item in switches.get("pauses") or () if (text := _pause_text(item))]
    paused = "; ".join(parts if parts and not switches.get("paused") else [paused, *parts])
    if not switches.get("breaker_open"):
        return f"{paused}, breaker closed"
    reason = f" ({words.plain(switches['breaker_reason'])})" if switches.get("breaker_reason") else ""
    return f"{paused}, breaker OPEN{reason}: close it with 'trainmedic resume --breaker'"


def _pause_text(item: Mapping[str, Any]) -> str:
    """Return "" for a pause that "paused by" describes in full."""
    end, note = item.get("until"), item.get("note")
    is_plain = item.get("scope") == "everything" and item.get("in_force") and not end and not note
    if is_plain:
        return ""
    why = f": {words.plain(note)}" if note else ""
    until = f" until {times.stamp(end)}" if end else ""
    return f"{_scope(item)} {_state(item)} by {words.plain(item.get('by'))}{until}{why}"


def _scope(item: Mapping[str, Any]) -> str:
    return words.plain(item.get("scope"))


def _state(item: Mapping[str, Any]) -> str:
    word = "observe only" if item.get("observe") else "paused"
    return word if item.get("in_force") else f"{word} from {times.stamp(item.get('starts_at'))}"


def _until(item: Mapping[str, Any]) -> str:
    every = f", every {words.plain(item['every'])}" if item.get("every") else ""
    return (times.stamp(item["until"]) if item.get("until") else "resumed") + every
