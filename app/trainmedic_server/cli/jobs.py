"""``trainmedic jobs``: which training jobs there are, and what an operator says of one."""

from __future__ import annotations

from urllib.parse import quote

import click

from trainmedic_server.cli.client import Client, server_options
from trainmedic_server.cli.connected import list_jobs
from trainmedic_server.cli.output import output_option
from trainmedic_server.presentation import words


@click.group(invoke_without_command=True)
@output_option("table")
@server_options
def jobs(client: Client, output: str) -> None:
    """List the training jobs that are connected, or say that one which is gone was meant to end."""
    if click.get_current_context().invoked_subcommand is None:
        list_jobs(client, output)


@jobs.command()
@click.argument("job", metavar="JOB")
@click.option("--note", required=True, metavar="TEXT", help="Who has ended it, and why; kept in the history.")
@server_options
def end(client: Client, job: str, note: str) -> None:
    """Say that a job which is gone was meant to end, so that TrainingGone ends. Who did it is recorded."""
    life = client.post(f"jobs/{quote(job)}/end", {"note": note})
    click.echo(f"{words.plain(life.get('name'))}: {words.plain(life.get('state'))}")
