"""``trainmedic jobs``: what an operator says of a training job."""

from __future__ import annotations

from urllib.parse import quote

import click

from trainmedic_server.cli import table
from trainmedic_server.cli.client import Client, server_options


@click.group()
def jobs() -> None:
    """Say that a job which is gone was meant to end. Who did it is recorded, by the token's name."""


@jobs.command()
@click.argument("job", metavar="JOB")
@click.option("--note", required=True, metavar="TEXT", help="Who has ended it, and why; kept in the history.")
@server_options
def end(client: Client, job: str, note: str) -> None:
    """Say that a job which is gone was meant to end, so that TrainingGone ends."""
    life = client.post(f"jobs/{quote(job)}/end", {"note": note})
    click.echo(f"{table.plain(life.get('name'))}: {table.plain(life.get('state'))}")
