"""``trainmedic why``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import click

from trainmedic_core import words
from trainmedic_core.cli.output import output_option, print_document
from trainmedic_core.words import plain
from trainmedic_server.cli import explained
from trainmedic_server.cli.client import Client, server_options
from trainmedic_server.cli.params import TimeParam, labels_option
from trainmedic_server.presentation import times

Document = Mapping[str, Any]


@click.command()
@click.option("--alert", "alertname", metavar="NAME", required=True, help="The alert's name.")
@labels_option("One of its labels. Repeatable.")
@click.option(
    "--since", type=TimeParam(), metavar="TIME", help="Received since then: a time, or a duration before now (90m, 7d)."
)
@click.option("--limit", type=click.IntRange(1, 1000), default=5, show_default=True, help="Maximum number of alerts.")
@output_option()
@server_options
def why(client: Client, alertname: str, labels: Mapping[str, str], since: str | None, limit: int, output: str) -> None:
    """Show what happened for an alert, or why nothing did, and what would happen if it fired now.

    \b
    trainmedic why --alert GPUTemperatureHigh
    trainmedic why --alert TrainingLossSpike --label job_name=llm-1 --since 1d
    """
    answer = history_and_forecast(client, alertname, labels, since, limit)
    print_document(answer, output, lambda _: _lines(alertname, answer["heard"], answer["more"], answer["now"]))


class ApiCalls(Protocol):
    """`Client`, or `Reader` for an assistant."""

    def get(self, path: str, params: Mapping[str, Any] | None = None) -> Any: ...
    def post(self, path: str, body: Any = None) -> Any: ...


def history_and_forecast(
    asked: ApiCalls, alertname: str, labels: Mapping[str, str], since: str | None, limit: int
) -> dict[str, Any]:
    """Return matching alerts (`heard`), whether there are `more`, and the forecast (`now`)."""
    pairs = [f"{name}={value}" for name, value in labels.items()]
    conditions = {"alertname": alertname, "label": pairs, "limit": limit} | ({"since": since} if since else {})
    page = asked.get("alerts", conditions)
    heard = page["items"]
    newest = heard[0] if heard else {"labels": {**labels, "alertname": alertname}}
    sent = newest.get("original_labels") or {**newest["labels"], "alertname": alertname}
    alert = {"labels": sent, "annotations": newest.get("annotations", {})}
    now = asked.post("explain", {**alert, "status": "firing"})
    return {"heard": heard, "more": page["next"] is not None, "now": now}


def _lines(alertname: str, alerts: Sequence[Document], has_more: bool, now: Document) -> Iterator[str]:
    if not alerts:
        yield (
            f"No alert {plain(alertname)} with these labels was received. If it was sent, check Alertmanager's routes."
        )
    for alert in alerts:
        yield from _received(alert)
    if has_more:
        yield "…and more; --limit shows them."
    yield ""
    yield "If it fired now:"
    for line in explained.lines(now):
        yield f"  {line}".rstrip()


def _received(alert: Document) -> Iterator[str]:
    labels = {name: value for name, value in alert["labels"].items() if name != "alertname"}
    often = f"received {alert['count']} times, first" if alert["count"] > 1 else "received once,"
    last = f", last {times.stamp(alert['last_heard'])}" if alert["count"] > 1 else ""
    yield f"{plain(alert['alert_name'])} {words.data(labels)}".rstrip()
    yield from explained.original_lines(alert, "  ")
    yield f"  {plain(alert['status'])}, {often} {times.stamp(alert['first_heard'])}{last}"
    if not alert["reactions"]:
        yield f"  {plain(alert['reason'])}"
        yield from explained.suggestion_lines(alert, "  ")
    for reaction in alert["reactions"]:
        reason = f": {plain(reaction['reason'])}" if reaction.get("reason") else ""
        run = f"  (run {plain(reaction['run_id'])})" if reaction.get("run_id") else ""
        playbook = f"{plain(reaction['playbook'])}: " if reaction["playbook"] else ""
        yield f"  {playbook}{plain(reaction['decision'])}{reason}{run}"
