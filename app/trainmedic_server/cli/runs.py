"""``trainmedic runs``: the orders that an operator can give to one run."""

from __future__ import annotations

import click

from trainmedic_server.cli import story, table
from trainmedic_server.cli.client import Client, server_options
from trainmedic_server.cli.history import run_path


@click.group()
def runs() -> None:
    """Approve, reject, cancel or undo a run, or close its undo. Who did it is recorded, by the token's name."""


def _order(kind: str, summary: str, needs_note: bool = False) -> click.Command:
    @click.command(kind.replace("_", "-"), help=summary)
    @click.argument("run_id", metavar="RUN")
    @click.option("--note", default="", required=needs_note, metavar="TEXT", help="Why; kept in the history.")
    @server_options
    def order(client: Client, run_id: str, note: str) -> None:
        run = client.post(f"runs/{run_path(run_id)}/{kind}", {"note": note})
        owed = ", owes an undo" if run.get("owes_undo") else ""
        click.echo(f"{table.plain(run.get('playbook'))} {table.plain(run.get('target'))}: {story.status(run)}{owed}")

    return order


runs.add_command(_order("approve", "Let a run that waits for approval go on."))
runs.add_command(_order("reject", "End a run that waits for approval; what it did is taken back."))
runs.add_command(_order("cancel", "Stop a run before its next step; what it did is taken back."))
runs.add_command(_order("undo", "Take back what a run did, now."))
runs.add_command(_order("close_undo", "End the duty to take back what a run did; say why.", needs_note=True))
