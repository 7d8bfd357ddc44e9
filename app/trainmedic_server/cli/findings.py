"""``trainmedic findings`` and ``keep``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import click

from trainmedic_core import words
from trainmedic_core.cli import groups, table
from trainmedic_core.cli.choice import NearestChoice
from trainmedic_core.cli.output import output_option, print_document, with_options
from trainmedic_logs.domain.finding import Role
from trainmedic_server.cli import listing, log_cuts, story
from trainmedic_server.cli.client import Client, server_options, unknown_job_note
from trainmedic_server.cli.params import TimeParam
from trainmedic_server.presentation import times

_HEADER = ("FINDING", "TIME", "RULE", "ROLE", "TARGET", "COUNT", "RANKS", "STATE", "LINE")
_LONGEST_RANKS = 20

Document = Mapping[str, Any]

_FILTERS: tuple[Callable[..., Any], ...] = (
    click.option("--job", metavar="NAME", help="About the job, or in its logs."),
    click.option("--claimed-job", metavar="NAME", help="In a log file that names this job, unproven."),
    click.option("--node", metavar="NAME", help="About the node, or read there."),
    click.option("--rule", metavar="NAME"),
    click.option("--role", type=NearestChoice([role.value for role in Role]), metavar="ROLE",
                 help=f"One of {', '.join(Role)}."),
    click.option("--since", type=TimeParam(), metavar="TIME",
                 help="With a line since then: a time, or a duration before now (90m, 7d)."),
    click.option("--suspected", flag_value="true", default=None, help="Only unconfirmed findings."),
    click.option("--open", "open_", flag_value="true", default=None, help="Show only open findings."),
)  # fmt: skip


@click.group(invoke_without_command=True)
@with_options(_FILTERS)
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Maximum number of findings.")
@output_option("table")
@server_options
def findings(client: Client, limit: int, output: str, open_: str | None, **filters: str | None) -> None:
    """Show findings of log rules, newest first.

    \b
    trainmedic findings --job llm-1 --since 1h
    trainmedic findings --node gpu-07 --role root
    trainmedic findings show FINDING
    """
    if click.get_current_context().invoked_subcommand is not None:
        groups.refuse_options("the list of findings", "output")
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
@click.option("--job", metavar="NAME", help="The finding's job. Required with a token limited to jobs.")
@output_option()
@server_options
def show(client: Client, finding_id: str, output: str, job: str | None) -> None:
    """Show one finding with its context lines in each stream."""
    if not finding_id.isascii() or not all(letter.isalnum() or letter in "-_" for letter in finding_id):
        raise click.UsageError(f"{finding_id!r} is not the id of a finding")
    path = f"findings/{finding_id}"
    finding = client.get(listing.job_path(job, path) if job else path)
    print_document(finding, output, story.finding_lines)


@click.command()
@click.argument("job", metavar="JOB[/ATTEMPT]", required=False)
@click.option(
    "--attempt", type=click.IntRange(min=1), help="The attempt, for a job name that ends in a slash and a number."
)
@click.option("--note", default="", metavar="TEXT", help="Reason, recorded in the history.")
@click.option("--release", is_flag=True, help="Remove the lock.")
@server_options
def keep(client: Client, job: str | None, attempt: int | None, note: str, release: bool) -> None:
    """Keep a job's findings, excerpts and verdicts past retention. Without JOB, list what is kept.

    \b
    trainmedic keep llm-1 --note "for the vendor"
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
        if doubt := unknown_job_note(client, name):
            click.echo(f"{doubt}; its data will be kept from its first line", err=True)


def _job_and_attempt(text: str) -> tuple[str, int | None]:
    name, slash, number = text.rpartition("/")
    has_attempt = slash and number.isascii() and number.isdecimal() and int(number) > 0
    return (name, int(number)) if has_attempt else (text, None)


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
