"""``trainmedic agents`` and ``jobs``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import click

from trainmedic_core import words
from trainmedic_core.cli import table
from trainmedic_core.cli.output import output_option, print_document
from trainmedic_server.cli import log_cuts
from trainmedic_server.cli.client import Client, every, server_options
from trainmedic_server.presentation import times

Document = Mapping[str, Any]
JOB_HEADER = ("JOB", "SEEN", "STEP", "RANKS", "GPUS", "NODES", "CAN", "DOUBTS")


@click.command()
@output_option("table")
@server_options
def agents(client: Client, output: str) -> None:
    """List connected node agents, and those lost within a day."""
    show(client, output, "agents", "agent", ("NODE", "SEEN", "GPUS", "VERSION", "DOUBTS"), _agent)


@click.group(invoke_without_command=True)
@output_option("table")
@server_options
def jobs(client: Client, output: str) -> None:
    """List connected training jobs, or mark a gone one as ended intentionally."""
    if click.get_current_context().invoked_subcommand is None:
        show(client, output, "jobs", "job", JOB_HEADER, _job)
        if output != "json":
            for line in log_cuts.lines(client):
                click.echo(line)


@jobs.command()
@click.argument("job", metavar="JOB")
@click.option("--note", required=True, metavar="TEXT", help="Who ended it, and why; recorded in the history.")
@output_option()
@server_options
def end(client: Client, job: str, note: str, output: str) -> None:
    """Mark a gone job as ended intentionally, which ends TrainingGone. Your name is recorded."""
    life = client.post(f"jobs/{quote(job)}/end", {"note": note})
    print_document(life, output, lambda _: [f"{words.plain(life.get('name'))}: {words.plain(life.get('state'))}"])


def show(
    client: Client,
    output: str,
    path: str,
    kind: str,
    header: Sequence[str],
    cells: Callable[[Document, str], Sequence[object]],
) -> None:
    items = list(every(client, path))
    if output == "json":
        print_document(items, output, list)
        return
    standing = client.get("now")
    if items:
        for line in table.rows(header, [cells(item, standing["at"]) for item in items], table.width()):
            click.echo(line)
        for line in _log_problems(items):
            click.echo(line)
    else:
        click.echo(f"No {kind} is connected.", err=True)
    for line in _lost(standing, kind):
        click.echo(line)


def _log_problems(items: Sequence[Document]) -> Iterator[str]:
    for item in items:
        logs = item.get("details", {}).get("logs")
        problem = logs.get("problem") if isinstance(logs, Mapping) else None
        if problem:
            yield f"LOGS {words.plain(item['name'])}: {words.plain(str(problem))}"


def _lost(standing: Document, kind: str) -> Iterator[str]:
    for each in standing["lost"]:
        if each["kind"] == kind:
            when = when_lost(each, standing["at"])
            yield f"LOST {words.plain(each['name'])}, {when}: {words.plain(each['reason'])}"


def when_lost(lost: Document, at: str) -> str:
    # The server does not know when a gone job was last connected.
    return f"{'last connected' if lost['kind'] == 'agent' else 'found gone'} {times.ago(lost['since'], at)}"


def _agent(item: Document, at: str) -> Sequence[object]:
    details = item.get("details", {})
    return (
        item["name"],
        times.age(item["last_seen"], at),
        _number(details.get("gpus")),
        details.get("version"),
        "; ".join(item.get("doubts", ())) or "-",
    )


def _job(item: Document, at: str) -> Sequence[object]:
    details = item.get("details", {})
    able = details.get("capabilities")
    return (
        item["name"],
        times.age(item["last_seen"], at),
        details.get("step"),
        _number(details.get("ranks")),
        _number(item.get("gpus")),
        words.few(item.get("nodes", ()), 2) or "-",
        ", ".join(name.removeprefix("job.") for name in able) if isinstance(able, list | dict) else "-",
        "; ".join(item.get("doubts", ())) or "-",
    )


def _number(reported: object) -> object:
    return len(reported) if isinstance(reported, list) else "-"
