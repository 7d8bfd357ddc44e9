"""Long lists of the server: read page by page, and written as JSON or CSV as they arrive.

Who uses it: ``history``, ``alerts``, ``findings``. How a table is laid out is in ``table``.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from trainmedic_server.cli.client import Client
from trainmedic_server.domain.plain_text import csv_cell, json_text

PAGE = 1000
"""Items; the most that the server gives at once."""

Item = Mapping[str, Any]


def items(
    client: Client, path: str, conditions: Mapping[str, Any], limit: int | None, page_size: int = PAGE
) -> Iterator[Item]:
    """The newest items that meet the conditions, page by page; all of them where `limit` is None."""
    cursor, left = None, limit
    while left is None or left > 0:
        size = page_size if left is None else min(left, page_size)
        page = client.get(path, {**conditions, "limit": size} | ({"cursor": cursor} if cursor else {}))
        yield from page["items"]
        cursor = page["next"]
        left = None if left is None else left - len(page["items"])
        if not cursor:
            return


def write_json(listed: Iterator[Item]) -> None:
    """One JSON array, written as it arrives."""
    between = "[\n"
    for item in listed:
        click.echo(between + json_text(item), nl=False)
        between = ",\n"
    click.echo("[]" if between == "[\n" else "\n]")


def write_csv(listed: Iterator[Item], columns: Sequence[str]) -> None:
    """These members of each item, under their names."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    for item in listed:
        writer.writerow([csv_cell(item.get(column)) for column in columns])
