"""``trainmedic alerts``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click

from trainmedic_core import words
from trainmedic_core.cli import table
from trainmedic_core.cli.choice import NearestChoice
from trainmedic_server.cli import listing
from trainmedic_server.cli.client import Client, server_options
from trainmedic_server.cli.params import TimeParam, pairs_of
from trainmedic_server.domain.alert import AlertStatus
from trainmedic_server.presentation import runs, times

_HEADER = ("RECEIVED", "ALERT", "STATUS", "TIMES", "LABELS", "REACTIONS")
# The members of an item, in the order of the server's CSV (`api.alert_list.HeardAlertView`).
_COLUMNS = (
    "alert_name", "labels", "annotations", "status", "fingerprint", "starts_at", "first_heard", "last_heard", "count",
    "resolved_at", "reacted", "reason", "reactions", "suggestion", "original_alert_name", "original_labels",
)  # fmt: skip


@click.command()
@click.option("--alert", "alertname", metavar="NAME", help="The alert's name.")
@click.option(
    "--label",
    "labels",
    metavar="NAME=VALUE",
    multiple=True,
    callback=pairs_of,
    help="One of its labels. Repeatable.",
)
@click.option(
    "--status", type=NearestChoice([status.value for status in AlertStatus]), help="Present status, as far as known."
)
@click.option("--nobody", is_flag=True, help="Only alerts without a reaction.")
@click.option("--since", type=TimeParam(), metavar="TIME", help="Start: a time, or a duration before now (90m, 7d).")
@click.option("--until", type=TimeParam(), metavar="TIME", help="End: a time, or a duration before now.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Maximum number of alerts.")
@click.option("--all", "everything", is_flag=True, help="Show all matches.")
@click.option("--output", type=NearestChoice(["table", "json", "csv"]), default="table", show_default=True)
@server_options
def alerts(
    client: Client,
    alertname: str | None,
    labels: Sequence[tuple[str, str]],
    status: str | None,
    nobody: bool,
    since: str | None,
    until: str | None,
    limit: int,
    everything: bool,
    output: str,
) -> None:
    """List received alerts, newest first, with each playbook's reaction.

    \b
    trainmedic alerts --nobody --since 1d
    trainmedic alerts --label job_name=llm-1 --status firing
    trainmedic alerts --output csv --all > alerts.csv
    """
    given = {"alertname": alertname, "status": status, "since": since, "until": until}
    conditions: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    conditions |= {"label": [f"{name}={value}" for name, value in labels]} if labels else {}
    conditions |= {"reacted": "false"} if nobody else {}
    listed = listing.items(client, "alerts", conditions, None if everything else limit)
    if output == "json":
        listing.write_json(listed)
    elif output == "csv":
        listing.write_csv(listed, _COLUMNS)
    elif rows := [_cells(item) for item in listed]:
        table.show(_HEADER, rows)
    else:
        click.echo("No alert matches.", err=True)


def _cells(item: listing.Item) -> tuple[object, ...]:
    labels = {name: value for name, value in item["labels"].items() if name != "alertname"}
    age = times.age(item["last_heard"], datetime.now(UTC).isoformat())
    name = item["alert_name"]
    if item.get("original_alert_name") not in (None, name):
        name = f"{name} (sent as {item['original_alert_name']})"
    return age, name, item["status"], f"×{item['count']}", words.data(labels), _outcome(item)


def _outcome(item: listing.Item) -> str:
    if not item["reacted"]:
        return str(item["reason"])
    parts = []
    for reaction in item["reactions"]:
        run = f" (run {runs.short_id(reaction['run_id'])})" if reaction.get("run_id") else ""
        parts.append(f"{reaction['playbook']}: {reaction['decision']}{run}")
    return "; ".join(parts)
