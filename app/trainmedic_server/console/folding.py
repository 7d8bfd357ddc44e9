"""Pages of lists in which rows that say the same are one row. Callers: the pages that
list runs or alerts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from trainmedic_server.console.page_request import PageRequest
from trainmedic_server.presentation.rows import Item, Row, Says, folded, refusal

_SEVERAL = ("status", "playbook", "decision")
"""Filters that take more than one value, with commas between them."""
_PAGE = 60
_FEW_ROWS = 30
_MORE = 250
_MOST_READ = 1_000


async def read(
    page_of: Callable[[dict[str, str]], Awaitable[Any]],
    cursor: str,
    says: Says | None,
    at: str,
) -> tuple[list[Row], str]:
    """The rows of a page from `cursor` on, and the cursor of the next page, empty at the end: as many items as fill it
    once they are folded, at most about a thousand.

    `page_of` asks the API with ``limit`` and ``cursor``; `says` and `at` are those of `rows.folded`.
    """
    items: list[Item] = []
    limit = _PAGE
    while True:
        listed = await page_of({"limit": str(limit), **({"cursor": cursor} if cursor else {})})
        items += listed["items"]
        cursor, limit = listed["next"] or "", _MORE
        rows = folded(items, says, at)
        if not cursor or len(rows) >= _FEW_ROWS or len(items) >= _MOST_READ:
            return rows, cursor


async def runs(
    page: PageRequest, chosen: Mapping[str, str], cursor: str = "", *, each: bool = False
) -> tuple[list[Row], str]:
    """The rows of the runs that are `chosen` by the API's filters, from `cursor` on, and the cursor of the next page,
    empty at the end; with `each`, every run has its own. Raises HttpProblem."""

    async def asked(bounds: Mapping[str, str]) -> Any:
        return await page.get("/history", [*_pairs(chosen), *bounds.items()])

    return await read(asked, cursor, None if each else refusal, "timestamp")


def alike_runs(chosen: Mapping[str, str], row: Row) -> str:
    """The query of the list that has each item of a row."""
    same = {name: row.item[name] for name in _SEVERAL}
    behind = datetime.fromisoformat(row.item["timestamp"]) + timedelta(microseconds=1)
    same |= {"alertname": row.item["alert_name"], "since": row.oldest["timestamp"], "until": behind.isoformat()}
    return urlencode({**chosen, **same, "each": "true"})


def _pairs(chosen: Mapping[str, str]) -> list[tuple[str, str]]:
    """The filters as the API takes them: several values of one name, one by one."""
    return [
        (name, part)
        for name, value in chosen.items()
        for part in (value.split(",") if name in _SEVERAL else [value])
        if part
    ]
