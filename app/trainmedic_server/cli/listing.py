"""Pages and output of lists."""

from __future__ import annotations

import csv
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import click

from trainmedic_core.cli import exits
from trainmedic_core.plain_text import csv_cell, json_text
from trainmedic_server.cli.client import Client

PAGE = 1000

Item = Mapping[str, Any]

_FILTERS_OF_JOB_LISTS: Mapping[str, Collection[str]] = {
    "findings": ("node", "rule", "role", "since", "suspected", "open"),
    "history": ("alertname", "playbook", "status", "decision", "node", "by", "since", "until", "open", "owes_undo"),
}
"""Filters of ``/jobs/JOB/PATH``, by path."""


def items(
    client: Client, path: str, conditions: Mapping[str, Any], limit: int | None, page_size: int = PAGE
) -> Iterator[Item]:
    """Yield the newest matching items, all if `limit` is None.

    For a token limited to jobs, list the one job in `conditions`.
    """
    cursor, left = None, limit
    while left is None or left > 0:
        size = page_size if left is None else min(left, page_size)
        asked: dict[str, Any] = {"limit": size} | ({"cursor": cursor} if cursor else {})
        try:
            page = client.get(path, {**conditions, **asked})
        except exits.NotAllowed:
            own = _list_of_job(path, conditions)
            if own is None:
                raise
            path, conditions = own
            page = client.get(path, {**conditions, **asked})
        yield from page["items"]
        cursor = page["next"]
        left = None if left is None else left - len(page["items"])
        if not cursor:
            return


def _list_of_job(path: str, conditions: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Return the job's path and other conditions; None unless these name one job and suit its list."""
    if path not in _FILTERS_OF_JOB_LISTS or not conditions.keys() <= {"job", *_FILTERS_OF_JOB_LISTS[path]}:
        return None
    job = conditions.get("job")
    names = [job] if isinstance(job, str) else list(job or ())
    if len(names) != 1:
        return None
    return job_path(names[0], path), {name: value for name, value in conditions.items() if name != "job"}


def job_path(job: str, path: str) -> str:
    return f"jobs/{quote(job)}/{path}"


def write_json(listed: Iterator[Item]) -> None:
    is_empty = True
    for item in listed:
        click.echo(("[\n" if is_empty else ",\n") + json_text(item), nl=False)
        is_empty = False
    click.echo("[]" if is_empty else "\n]")


def write_csv(listed: Iterator[Item], columns: Sequence[str]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    for item in listed:
        writer.writerow([csv_cell(item.get(column)) for column in columns])
