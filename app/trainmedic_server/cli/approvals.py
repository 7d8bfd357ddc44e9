"""``trainmedic approvals``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from trainmedic_core import words
from trainmedic_core.cli.output import output_option, print_document
from trainmedic_server.cli.client import Client, server_options
from trainmedic_server.presentation import questions, steps, targets, times


@click.command()
@output_option()
@server_options
def approvals(client: Client, output: str) -> None:
    """Show questions that wait for people: what would be done, who may answer, and until when.

    Answer with 'trainmedic runs approve RUN' or 'trainmedic runs reject RUN'.
    """
    items = client.get("approvals")["items"]
    print_document(items, output, _list)


def _list(items: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "\n\n".join("\n".join(_lines(item)) for item in items) or "Nothing waits for approval."


def _lines(item: Mapping[str, Any]) -> Iterator[str]:
    yield f"{words.plain(item.get('question'))}"
    yield f"  {'run':<9}{words.plain(item.get('run_id'))}  {words.plain(item.get('playbook'))}"
    yield f"  {'for':<9}{words.plain(item.get('target'))}, because of {words.plain(item.get('alert_name'))}"
    index_of = targets.index_in(item.get("alert_labels") or {})
    for number, line in enumerate(steps.sentences(item.get("steps", ()), item.get("target"), index_of), 1):
        yield f"  {'would' if number == 1 else '':<9}{number}. {words.plain(line)}"
    yield f"  {'reaches':<9}{_reach(item)}"
    yield f"  {'until':<9}{_until(item)}"
    yield f"  {'by':<9}{_by(item)}"
    if item.get("link"):
        yield f"  {'link':<9}{words.plain(item['link'])}"


def _reach(item: Mapping[str, Any]) -> str:
    where, gpus = words.few(item.get("nodes") or []) or "no node that is known", item.get("gpus")
    return where if gpus is None else f"{where}; {words.count(gpus, 'GPU')}"


def _until(item: Mapping[str, Any]) -> str:
    # Until when the question waits.
    asked = f"asked {times.stamp(item.get('asked_at'))}"
    often = f", {item['asked']} times so far" if (item.get("asked") or 1) > 1 else ""
    if item.get("asked_again_at"):
        return f"no answer in time; next question {times.stamp(item['asked_again_at'])}"
    if not item.get("until"):
        return f"an answer comes; {asked}{often}"
    return f"{times.stamp(item['until'])}, then {questions.without_answer(item.get('on_timeout'))}; {asked}{often}"


def _by(item: Mapping[str, Any]) -> str:
    who = questions.who_may_answer(item.get("by"), item.get("count"))
    parts = questions.state_parts({**item, "asked": None})  # `_until` has stated how often it was asked
    return words.plain("; ".join((who, *parts)))
