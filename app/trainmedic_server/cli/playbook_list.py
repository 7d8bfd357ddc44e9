"""``trainmedic playbook list``: what the server has loaded, and how its runs ended."""

from __future__ import annotations

from collections.abc import Mapping

import click

from trainmedic_server.cli import table
from trainmedic_server.cli.client import Client, server_options
from trainmedic_server.cli.connected import output_option
from trainmedic_server.domain.modes import Mode
from trainmedic_server.domain.plain_text import json_text

_HEADER = ("PLAYBOOK", "MODE", "ALERTS", "RUNS", "OPEN", "FAILED", "HELD BACK", "SUMMARY")


@click.command(name="list")
@output_option
@server_options
def list_playbooks(client: Client, output: str) -> None:
    """List the playbooks that the server has loaded, with how their runs ended, and files that it could not load."""
    reply = client.get("playbooks")
    if output == "json":
        click.echo(json_text(reply, indent=2))
        return
    allowed = Mode(client.get("now")["mode"])
    lines = [
        (item["name"], _mode(item["mode"], allowed), ", ".join(item["alerts"]), *_ended(item["runs"]), item["summary"])
        for item in reply["items"]
    ]
    for line in table.rows(_HEADER, lines, table.width()):
        click.echo(line)
    for problem in reply["errors"]:
        place = ":".join(str(part) for part in (problem["file"], problem["line"], problem["column"]) if part)
        click.echo(f"NOT LOADED {table.plain(place)}: {table.plain(problem['message'])}")


def _mode(own: str, allowed: Mode) -> str:
    """The mode that counts: the stricter of the playbook's and the server's."""
    counts = Mode.stricter(Mode(own), allowed)
    return own if counts == own else f"{counts} (server)"


def _ended(runs: Mapping[str, int]) -> tuple[int, int, int, int]:
    """How many runs were started, are open, failed, and were decided against."""
    held_back = runs.get("not_started", 0)
    is_open = sum(runs.get(status, 0) for status in ("running", "waiting", "awaiting_approval"))
    return sum(runs.values()) - held_back, is_open, runs.get("failed", 0), held_back
