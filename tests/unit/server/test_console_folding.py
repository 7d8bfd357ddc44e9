"""Rows that say the same are one, and a page is filled with what is left."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from trainmedic_server.server.console import folding

START = datetime(2026, 1, 31, 3, tzinfo=UTC)


def _item(number: int, says: str | None, minutes: float = 0) -> Mapping[str, Any]:
    return {"number": number, "says": says, "at": (START - timedelta(minutes=minutes)).isoformat()}


def _says(item: Mapping[str, Any]) -> str | None:
    said: str | None = item["says"]
    return said


def test_what_says_the_same_within_an_hour_is_one_row_in_the_place_of_the_newest() -> None:
    """What comes between keeps its row, and so does what is an hour older."""
    items = [_item(0, "full"), _item(1, None, 1), _item(2, "full", 2), _item(3, "full", 60), _item(4, "full", 61)]
    rows = folding.folded(items, _says, "at")
    assert [(row.item["number"], row.count, row.oldest["number"]) for row in rows] == [(0, 3, 3), (1, 1, 1), (4, 1, 4)]
    assert len(folding.folded(items, None, "at")) == 5


async def test_a_page_is_filled_though_hundreds_of_items_fold_into_one_row() -> None:
    """The cursor leads on to what was not read, and is empty at the end; one page reads a bounded number."""
    items = [_item(number, "full" if number < 300 else None) for number in range(400)]

    async def page_of(bounds: Mapping[str, str]) -> Any:
        first = int(bounds.get("cursor", "0"))
        after = first + int(bounds["limit"])
        return {"items": items[first:after], "next": str(after) if after < len(items) else None}

    rows, cursor = await folding.read(page_of, "", _says, "at")
    assert (rows[0].count, rows[1].item["number"], cursor) == (300, 300, "")
    assert len(rows) == 101
    rows, cursor = await folding.read(page_of, "", None, "at")
    assert (len(rows), cursor) == (60, "60")
    items += [_item(number, "full") for number in range(400, 5000)]
    items[300:400] = [_item(number, "full") for number in range(300, 400)]
    rows, cursor = await folding.read(page_of, "", _says, "at")
    assert (len(rows), cursor) == (1, str(rows[0].count))
    assert 1000 <= int(cursor) < 1250
