"""Lists in which rows that say the same are one row, so that decisions in their hundreds push nothing off a page. Who
calls it: the pages about runs and about alerts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct, field

Item = Mapping[str, Any]

_PAGE = 60
_FEW_ROWS = 30
_MORE = 250
_MOST_READ = 1_000
_WITHIN = timedelta(hours=1)


class FoldedRow(Struct, frozen=True):
    """An item, and how many others say the same; the oldest of them."""

    item: Item
    alike: list[Item] = field(default_factory=list)

    @property
    def count(self) -> int:
        return 1 + len(self.alike)

    @property
    def oldest(self) -> Item:
        return self.alike[-1] if self.alike else self.item


async def read(
    page_of: Callable[[dict[str, str]], Awaitable[Any]],
    cursor: str,
    says: Callable[[Item], Hashable | None] | None,
    at: str,
) -> tuple[list[FoldedRow], str]:
    """The rows of a page from `cursor` on, and the cursor of the next page, empty at the end: as many items as fill it
    once they are folded, at most about a thousand.

    `page_of` asks the API with ``limit`` and ``cursor``; `says` and `at` are those of `folded`.
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


def folded(items: Iterable[Item], says: Callable[[Item], Hashable | None] | None, at: str) -> list[FoldedRow]:
    """The rows of `items`, which come newest first: those that say the same within an hour are one, in the place of the
    newest.

    `says` is what an item says, None for one that keeps its own row; where it is None itself, all do. `at` names the
    member that has an item's time.
    """
    newest: dict[Hashable, FoldedRow] = {}
    rows: list[FoldedRow] = []
    for item in items:
        said = says(item) if says else None
        row = newest.get(said) if said is not None else None
        if row is not None and _time(row.item[at]) - _time(item[at]) <= _WITHIN:
            row.alike.append(item)
            continue
        row = FoldedRow(item)
        rows.append(row)
        if said is not None:
            newest[said] = row
    return rows


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
