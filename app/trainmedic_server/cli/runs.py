"""``trainmedic runs``."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import click

from trainmedic_core import words
from trainmedic_core.cli import exits
from trainmedic_core.target import TargetKind
from trainmedic_server.cli import story
from trainmedic_server.cli.client import Client, server_options, unknown_job_note
from trainmedic_server.cli.history import run_path
from trainmedic_server.cli.params import labels_option
from trainmedic_server.domain.run import OPEN
from trainmedic_server.presentation.runs import short_id


@click.group()
def runs() -> None:
    """Approve, reject, cancel, undo, start or retry a run. The token's name is recorded.

    'trainmedic history' lists runs, 'trainmedic approvals' those that ask.
    """


def _operator_command(kind: str, summary: str, needs_note: bool = False) -> click.Command:
    ends_run = kind in ("reject", "cancel")
    # An option with a default is never missing.
    required_or_empty: dict[str, Any] = {"required": True} if needs_note else {"default": ""}

    @click.command(kind.replace("_", "-"), help=summary)
    @click.argument("run_id", metavar="RUN")
    @click.option("--note", **required_or_empty, metavar="TEXT", help="Reason, recorded in the history.")
    @server_options
    def order(client: Client, run_id: str, note: str, undo: bool = False) -> None:
        run = client.post(f"runs/{run_path(run_id)}/{kind}", {"note": note, "undo": True} if undo else {"note": note})
        owed = ", has a pending undo" if run.get("owes_undo") else ""
        if owed and ends_run and not undo:
            owed += f" ('trainmedic runs undo {short_id(run['run_id'])}' reverts it now)"
        is_ending = kind in ("cancel", "undo") and run.get("status") in OPEN
        later = ", and ends after its present step ('trainmedic now' shows when)" if is_ending else ""
        what = f"{words.plain(run.get('playbook'))} {words.plain(run.get('target'))}"
        # An approved run may not act: the breaker opened, or its alert resolved.
        why = run.get("message") if kind == "approve" and run.get("status") not in OPEN else None
        click.echo(f"{what}: {story.status(run)}{owed}{later}{f': {words.plain(why)}' if why else ''}")

    if ends_run:
        click.option("--undo", is_flag=True, help="Also revert all its changes now, as 'runs undo' does.")(order)
    return order


@runs.command()
@click.argument("run_id", metavar="RUN")
@click.option("--note", default="", metavar="TEXT", help="Reason, recorded in the history.")
@server_options
def retry(client: Client, run_id: str, note: str) -> None:
    """Retry an unsuccessful run while its alert still fires."""
    _print_start(client.post(f"runs/{run_path(run_id)}/retry", {"note": note, "key": str(uuid.uuid4())}))


@runs.command()
@click.argument("playbook")
@click.option(
    "--target", metavar="KIND:NAME", help="Such as job:llm-1. Unneeded if the playbook derives it from inputs."
)
@labels_option("An input of a playbook with 'on: manual'. Repeatable.", "--input", "inputs")
@labels_option("A label that the alert must have. Repeatable.")
@click.option("--dry-run", is_flag=True, help="Only show what would be done, or what prevents it.")
@click.option("--key", metavar="TEXT", help="Idempotency key. Repeating a request with it starts no second run.")
@click.option("--note", default="", metavar="TEXT", help="Reason, recorded in the history.")
@server_options
def start(client: Client, key: str | None, **wanted: Any) -> None:
    """Start a playbook on a target, with the same guards as for an alert.

    The run is tied to a firing alert for it, if there is one. Otherwise its changes stay until 'trainmedic runs undo'.

    \b
    trainmedic runs start training-loss-spike --target job:llm-1 --dry-run
    """
    kind, _, name = str(wanted["target"]).partition(":")
    if kind == TargetKind.JOB and (doubt := unknown_job_note(client, name)):
        click.echo(doubt, err=True)
    _print_start(client.post("runs", {**wanted, "key": key or str(uuid.uuid4())}))


def _print_start(started: Mapping[str, Any]) -> None:
    """Raise Failure if no run was, or would be, started."""
    is_dry, decision = started["run"] is None, started["decision"]
    for step in started["steps"]:
        note = f"  ({words.plain(step['note'])})" if step.get("note") else ""
        click.echo(f"  {words.plain(step['id'])}: {words.plain(step['action'])}  {words.data(step['params'])}{note}")
    what = f"{words.plain(started['playbook'])} {words.plain(started['target'])}".rstrip()  # a target may be unknown
    if decision not in ("started", "observe_only"):
        raise exits.Failure(f"{what}: {'would not start' if is_dry else 'not started'}: {decision}: {started['why']}")
    waits = f", and waits for run {words.plain(started['waits_for'])}" if started.get("waits_for") else ""
    begins = "would only be recorded" if decision == "observe_only" else "would start"
    if is_dry:
        click.echo(f"{what}: {begins}, mode {started['mode']}, for {words.plain(started['alert_name'])}{waits}")
    else:
        again = ", started by this request before" if started["repeated"] else ""
        click.echo(f"{what}: {story.status(started['run'])}, run {words.plain(started['run']['run_id'])}{again}{waits}")


runs.add_command(_operator_command("approve", "Let a run that waits for approval continue."))
_REVERT_HELP = (
    "Changes with 'undo: on_failure' are reverted at once, those with 'undo: on_resolve' when the alert resolves. "
    "With --undo all its changes are reverted at once."
)
runs.add_command(_operator_command("reject", f"End a run that waits for approval.\n\n{_REVERT_HELP}"))
runs.add_command(_operator_command("cancel", f"End a run before its next step.\n\n{_REVERT_HELP}"))
runs.add_command(_operator_command("undo", "End a run if it is open, and revert all its changes now."))
runs.add_command(_operator_command("close_undo", "End the obligation to undo a run; state why.", needs_note=True))
