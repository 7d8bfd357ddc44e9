"""``trainmedic findings`` and ``trainmedic keep``: what log rules have found, and what of it is never deleted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import click

from trainmedic_core import words
from trainmedic_core.cli import table
from trainmedic_core.cli.output import output_option, print_document
from trainmedic_logs.domain.finding import Role
from trainmedic_server.cli import listing, log_cuts, story
from trainmedic_server.cli.client import Client, server_options, unknown_job
from trainmedic_server.cli.params import TimeParam
from trainmedic_server.presentation import times

_HEADER = ("FINDING", "TIME", "RULE", "ROLE", "TARGET", "COUNT", "RANKS", "STATE", "LINE")
_LONGEST_RANKS = 20

Document = Mapping[str, Any]

_FILTERS: tuple[Callable[..., Any], ...] = (
    click.option("--job", metavar="NAME", help="About the job, or in its logs."),
    click.option("--claimed-job", metavar="NAME", help="In a log file that names this job, without proof."),
    click.option("--node", metavar="NAME", help="About the node, or read there."),
    click.option("--rule", metavar="NAME"),
    click.option("--role", type=click.Choice([role.value for role in Role]), metavar="ROLE",
                 help=f"One of {', '.join(Role)}."),
    click.option("--since", type=TimeParam(), metavar="TIME",
                 help="With a line from then on: a time, or how long ago (90m, 7d)."),
    click.option("--suspected", flag_value="true", default=None, help="Those that nothing has confirmed."),
    click.option("--open", "open_", flag_value="true", default=None, help="Those that are not over."),
)  # fmt: skip


def _filters(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_FILTERS):
        command = option(command)
    return command


@click.group(invoke_without_command=True)
@_filters
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="At most so many findings.")
@output_option("table")
@server_options
def findings(client: Client, limit: int, output: str, open_: str | None, **filters: str | None) -> None:
    """Show what log rules have found, newest first.

    \b
    trainmedic findings --job llm-1 --since 1h
    trainmedic findings --node gpu-07 --role root
    trainmedic findings show 019c1415-6c05-7c11-9a0d-6f1d2e3c4b5a
    """
    if click.get_current_context().invoked_subcommand is not None:
        return
    conditions = {name: value for name, value in {**filters, "open": open_}.items() if value is not None}
    items = list(listing.items(client, "findings", conditions, limit))
    if output == "json":
        print_document(items, output, list)
        return
    if not items:
        click.echo("No finding matches.", err=True)
    else:
        table.show(_HEADER, [_cells(item) for item in items])
    for line in log_cuts.lines(client, filters["job"], filters["node"]):
        click.echo(line, err=True)


@findings.command()
@click.argument("finding_id", metavar="FINDING")
@click.option("--job", metavar="NAME", help="The finding's job. A token that is bounded to jobs needs it.")
@output_option()
@server_options
def show(client: Client, finding_id: str, output: str, job: str | None) -> None:
    """Show one finding, and the lines around it in each stream."""
    if not finding_id.isascii() or not all(letter.isalnum() or letter in "-_" for letter in finding_id):
        raise click.UsageError(f"{finding_id!r} is not the id of a finding")
    path = f"findings/{finding_id}"
    finding = client.get(listing.job_path(job, path) if job else path)
    print_document(finding, output, story.finding_lines)


@click.command()
@click.argument("job", metavar="JOB[/ATTEMPT]", required=False)
@click.option(
    "--attempt", type=click.IntRange(min=1), help="The attempt, for a job with a number behind its last slash."
)
@click.option("--note", default="", metavar="TEXT", help="Why; kept in the history.")
@click.option("--release", is_flag=True, help="Take the lock back.")
@server_options
def keep(client: Client, job: str | None, attempt: int | None, note: str, release: bool) -> None:
    """Keep the findings, excerpts and verdicts of a job however old they get. Without a JOB, list what is kept.

    \b
    trainmedic keep llm-1 --note "for the vendor"
    trainmedic keep llm-1/3
    trainmedic keep llm-1/3 --release
    """
    if job is None:
        kept = client.get("kept")["items"]
        click.echo("\n".join(map(_kept_line, kept)) if kept else "Nothing is kept.")
        return
    name, number = _job_and_attempt(job) if attempt is None else (job, attempt)
    path, body = f"jobs/{quote(name)}", {"attempt": number} if number is not None else {}
    if release:
        left = client.post(f"{path}/release", body)["items"]
        click.echo("Released." + "".join(f"\n{_kept_line(each)}" for each in left))
    else:
        click.echo(_kept_line(client.post(f"{path}/keep", {**body, "note": note})))
        if doubt := unknown_job(client, name):
            click.echo(f"{doubt}; it is kept from its first line on", err=True)


def _job_and_attempt(text: str) -> tuple[str, int | None]:
    name, slash, number = text.rpartition("/")
    return (name, int(number)) if slash and number.isdecimal() and number.isascii() and int(number) else (text, None)


def _kept_line(kept: Document) -> str:
    attempt = f", attempt {kept['attempt']}" if kept.get("attempt") else ""
    note = f": {words.plain(kept['note'])}" if kept.get("note") else ""
    by = words.plain(kept.get("by"))
    return f"{words.plain(kept.get('job'))}{attempt}  kept since {times.stamp(kept.get('at'))} by {by}{note}"


def _cells(item: Document) -> tuple[object, ...]:
    ranks = str(item.get("ranks") or "-")
    shown = ranks if len(ranks) <= _LONGEST_RANKS else f"{ranks[:_LONGEST_RANKS]}…"
    state = "suspected" if item.get("suspected") else "open" if item.get("open") else str(item.get("ended_because"))
    target = story.finding_target(item)
    members = (item.get("rule"), item.get("role"), target, item.get("count"))
    return (item.get("id"), times.stamp(item.get("first_at")), *members, shown, state, item.get("line"))
