"""``trainmedic approvals``: what waits for people, with what would be done and until when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from trainmedic_server.cli import story, table
from trainmedic_server.cli.client import Client, server_options
from trainmedic_server.domain.plain_text import json_text

_SHOWN_NODES = 8


@click.command()
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@server_options
def approvals(client: Client, output: str) -> None:
    """Show what waits for people: the question, what would be done, by whom, until when.

    Answer with 'trainmedic runs approve RUN' or 'trainmedic runs reject RUN'.
    """
    items = client.get("approvals")["items"]
    if output == "json":
        click.echo(json_text(items, indent=2))
    elif not items:
        click.echo("Nothing waits for approval.")
    else:
        click.echo("\n\n".join("\n".join(_lines(item)) for item in items))


def _lines(item: Mapping[str, Any]) -> Iterator[str]:
    yield f"{table.plain(item.get('question'))}"
    yield f"  {'run':<9}{table.plain(item.get('run_id'))}  {table.plain(item.get('playbook'))}"
    yield f"  {'for':<9}{table.plain(item.get('target'))}, because of {table.plain(item.get('alert_name'))}"
    for step in item.get("steps", ()):
        yield f"  {'would':<9}{_step(step)}"
    yield f"  {'reaches':<9}{_reach(item)}"
    yield f"  {'until':<9}{_until(item)}"
    yield f"  {'by':<9}{_by(item)}"
    if item.get("link"):
        yield f"  {'link':<9}{table.plain(item['link'])}"


def _step(step: Mapping[str, Any]) -> str:
    note = f"  ({table.plain(step['note'])})" if step.get("note") else ""
    return f"{table.plain(step.get('action'))}  {story.data(step.get('params') or {})}".rstrip() + note


def _reach(item: Mapping[str, Any]) -> str:
    nodes, gpus = item.get("nodes") or [], item.get("gpus")
    more = f" and {len(nodes) - _SHOWN_NODES} more" if len(nodes) > _SHOWN_NODES else ""
    where = (", ".join(map(table.plain, nodes[:_SHOWN_NODES])) or "no node that is known") + more
    return where if gpus is None else f"{where}; {table.count(gpus, 'GPU')}"


def _until(item: Mapping[str, Any]) -> str:
    asked = f"asked {story.moment(item.get('asked_at'))}"
    times = f", {item['asked']} times so far" if (item.get("asked") or 1) > 1 else ""
    if item.get("asked_again_at"):
        return f"nobody answered in time; asked again {story.moment(item['asked_again_at'])}"
    if not item.get("until"):
        return f"somebody answers; {asked}{times}"
    return f"{story.moment(item['until'])}, then {table.plain(item.get('on_timeout'))}; {asked}{times}"


def _by(item: Mapping[str, Any]) -> str:
    who = " or ".join(map(table.plain, item.get("by") or ())) or "any operator"
    given = ", ".join(map(table.plain, item.get("approved_by") or ()))
    number = f", {item['count']} different people" if (item.get("count") or 1) > 1 else ""
    escalated = ", handed on" if item.get("escalated") else ""
    return f"{who}{number}{escalated}" + (f"; approved by {given}" if given else "")
