from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from trainmedic_server.console.page_request import PageRequest
from trainmedic_server.presentation.rows import Item, KeyOf, Row, folded, refusal_key

_COMMA_SEPARATED = ("status", "playbook", "decision")
_PAGE = 60  # items of the first request
_FEW_ROWS = 30  # fewer folded rows: more items are read
_MORE = 250  # items of each further request
_MOST_READ = 1_000  # items for one page


async def read_rows(
    page_of: Callable[[dict[str, str]], Awaitable[Any]],
    cursor: str,
    key_of: KeyOf | None,
    at: str,
) -> tuple[list[Row], str]:
    """Return rows from `cursor` on, and the next cursor, "" at the end. Reads about 1,000 items at most."""
    items: list[Item] = []
    limit = _PAGE
    while True:
        listed = await page_of({"limit": str(limit), **({"cursor": cursor} if cursor else {})})
        items += listed["items"]
        cursor, limit = listed["next"] or "", _MORE
        rows = folded(items, key_of, at, is_cut=bool(cursor))
        if not cursor or len(rows) >= _FEW_ROWS or len(items) >= _MOST_READ:
            return rows, cursor


async def runs(
    page: PageRequest, chosen: Mapping[str, str], cursor: str = "", *, each: bool = False
) -> tuple[list[Row], str]:
    """Return rows and the next cursor. With `each`, rows are not folded. Raises HttpProblem."""

    async def asked(bounds: Mapping[str, str]) -> Any:
        return await page.api.get("/history", [*pairs(chosen), *bounds.items()])

    return await read_rows(asked, cursor, None if each else refusal_key, "timestamp")


def alike_runs(chosen: Mapping[str, str], row: Row) -> str:
    """Return the query of the page with this row's items, one by one."""
    same = {name: row.item[name] for name in _COMMA_SEPARATED}
    # `until` excludes its own time.
    behind = datetime.fromisoformat(row.item["timestamp"]) + timedelta(microseconds=1)
    same |= {"alertname": row.item["alert_name"], "since": row.oldest["timestamp"], "until": behind.isoformat()}
    return urlencode({**chosen, **same, "each": "true"})


def pairs(chosen: Mapping[str, str]) -> list[tuple[str, str]]:
    return [
        (name, part)
        for name, value in chosen.items()
        for part in (value.split(",") if name in _COMMA_SEPARATED else [value])
        if part
    ]
