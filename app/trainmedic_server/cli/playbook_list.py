"""``trainmedic playbook list`` and ``versions``."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import click

from trainmedic_core import words
from trainmedic_core.cli import table
from trainmedic_core.cli.output import output_option, print_document
from trainmedic_core.plain_text import visible
from trainmedic_server.cli.client import Client, server_options
from trainmedic_server.domain.modes import Mode
from trainmedic_server.presentation import times

_VERSION_HEADER = ("VERSION", "LOADED", "RUNS", "FIRST USED", "LAST USED")
_HEADER = ("PLAYBOOK", "MODE", "BEGINS WITH", "RUNS", "OPEN", "FAILED", "BLOCKED", "SUMMARY")


@click.command(name="list")
@output_option("table")
@server_options
def list_playbooks(client: Client, output: str) -> None:
    """List the server's loaded playbooks with the outcomes of their runs, and files that it could not load."""
    reply = client.get("playbooks")
    if output == "json":
        print_document(reply, output, list)
        return
    allowed = Mode(client.get("now")["mode"])
    lines = [
        (
            item["name"],
            _effective_mode(item["mode"], allowed),
            item.get("begins") or ", ".join(item["alerts"]) or "started by people",
            *_run_counts(item["runs"]),
            item["summary"],
        )
        for item in reply["items"]
    ]
    table.show(_HEADER, lines)
    for problem in reply["errors"]:
        place = ":".join(str(part) for part in (problem["file"], problem["line"], problem["column"]) if part)
        click.echo(f"NOT LOADED {words.plain(place)}: {words.plain(problem['message'])}")


@click.command(name="versions")
@click.argument("name", metavar="PLAYBOOK")
@click.option("--since", "before", metavar="VERSION", help="Show changes since this version, or a beginning of it.")
@output_option("table")
@server_options
def list_versions(client: Client, name: str, before: str | None, output: str) -> None:
    """List the past texts of a playbook, the loaded one first, and show the last change."""
    path = f"playbooks/{quote(name, safe='')}/versions"
    reply = client.get(path, {"before": before} if before else None)
    items = reply["items"]
    if before is None and len(items) > 1:
        reply = client.get(path, {"before": items[1]["version"], "after": items[0]["version"]})
    if output == "json":
        print_document(reply, output, list)
        return
    at = datetime.now(UTC).isoformat()
    lines = [
        (item["version"][:12], "yes" if item["loaded"] else "no", item["runs"], *_first_and_last_use(item, at))
        for item in items
    ]
    table.show(_VERSION_HEADER, lines)
    if diff := reply["diff"]:
        click.echo("")
        for line in diff["text"].splitlines():
            click.echo(visible(line, keep="\t"))


def _first_and_last_use(item: Mapping[str, Any], at: str) -> tuple[str, str]:
    return times.age(item["first_used_at"], at), times.age(item["last_used_at"], at)


def _effective_mode(own: str, allowed: Mode) -> str:
    effective = Mode.stricter(Mode(own), allowed)
    return own if effective == own else f"{effective} (server)"


def _run_counts(runs: Mapping[str, int]) -> tuple[int, int, int, int]:
    """Return the numbers of runs started, open, failed, and decided against."""
    blocked = runs.get("not_started", 0)
    is_open = sum(runs.get(status, 0) for status in ("running", "waiting", "awaiting_approval"))
    return sum(runs.values()) - blocked, is_open, runs.get("failed", 0), blocked
