"""Rows that say the same are one, and a page is filled with what is left."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any

from msgspec.structs import replace

from tests.support.api_world import World, payload
from trainmedic_server.console import folding
from trainmedic_server.domain.run import Decision, Status
from trainmedic_server.presentation import rows as rows_of

START = datetime(2026, 1, 31, 3, tzinfo=UTC)


def _item(number: int, says: str | None, minutes: float = 0) -> Mapping[str, Any]:
    return {"number": number, "says": says, "at": (START - timedelta(minutes=minutes)).isoformat()}


def _says(item: Mapping[str, Any]) -> str | None:
    said: str | None = item["says"]
    return said


def test_what_says_the_same_within_an_hour_is_one_row_in_the_place_of_the_newest() -> None:
    """What comes between keeps its row, and so does what is an hour older."""
    items = [_item(0, "full"), _item(1, None, 1), _item(2, "full", 2), _item(3, "full", 60), _item(4, "full", 61)]
    rows = rows_of.folded(items, _says, "at")
    assert [(row.item["number"], row.count, row.oldest["number"]) for row in rows] == [(0, 3, 3), (1, 1, 1), (4, 1, 4)]
    assert len(rows_of.folded(items, None, "at")) == 5


async def test_a_page_is_filled_though_hundreds_of_items_fold_into_one_row() -> None:
    """The cursor leads on to what was not read, and is empty at the end; one page reads a bounded number."""
    items = [_item(number, "full" if number < 300 else None) for number in range(400)]

    async def page_of(bounds: Mapping[str, str]) -> Any:
        first = int(bounds.get("cursor", "0"))
        after = first + int(bounds["limit"])
        return {"items": items[first:after], "next": str(after) if after < len(items) else None}

    rows, cursor = await folding.read_rows(page_of, "", _says, "at")
    assert (rows[0].times, rows[1].item["number"], cursor) == ("300", 300, "")
    assert len(rows) == 101
    rows, cursor = await folding.read_rows(page_of, "", None, "at")
    assert (len(rows), cursor) == (60, "60")
    items += [_item(number, "full") for number in range(400, 5000)]
    items[300:400] = [_item(number, "full") for number in range(300, 400)]
    rows, cursor = await folding.read_rows(page_of, "", _says, "at")
    assert (len(rows), cursor) == (1, str(rows[0].count))
    assert 1000 <= int(cursor) < 1250
    assert rows[0].times == f"{cursor}+"  # not a number that others take for all


async def test_every_page_that_lists_runs_folds_what_was_held_back() -> None:
    """What ran on the node stays to be seen below a storm; the row leads to each of its runs."""
    world = World()
    async with world.client() as client:
        await client.post("/webhook", json=payload())
        (began,) = world.history.records.values()
        for number in range(80):
            held = replace(
                began.run,
                id=f"{number:08x}-0000-7000-8000-000000000000",
                created_at=began.run.created_at + timedelta(seconds=1 + number),
                status=Status.NOT_STARTED,
                decision=Decision.CONCURRENCY_LIMITED,
                message=f"16 runs are open; {number % 2}",
            )
            world.history.records[held.id] = replace(began, run=held)
        target = began.run.target
        assert target is not None
        for path in ("/runs", f"/nodes/{target.node}", f"/playbooks/{began.run.playbook}"):
            page = (await client.get(path, headers={"accept": "text/html"})).text
            assert (page.count('<tr id="alike-'), page.count('<tr id="run-')) == (1, 1), path
            (row,) = re.findall(r'<a class="open" href="([^"]+)">show 80</a>', page)
            assert re.search("until=[^&]+", row), path
            assert "newest of 2 reasons: 16 runs are open; 1" in page, path
            one_by_one = (await client.get(unescape(row), headers={"accept": "text/html"})).text
            assert (one_by_one.count('<tr id="alike-'), one_by_one.count('<tr id="run-')) == (0, 60), path
