"""Pages of lists in which rows that say the same are one row. Callers: the pages about runs and about alerts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from trainmedic_server.presentation.rows import Item, Row, Says, folded

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
