"""Runs as rows, in which decisions not to start that say the same are one. Who calls it: the pages that list runs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from trainmedic_server.presentation.rows import Row, refusal
from trainmedic_server.server.console import folding
from trainmedic_server.server.console.page_request import PageRequest

_SEVERAL = ("status", "playbook", "decision")
"""Filters that take more than one value, with commas between them."""


async def read(
    page: PageRequest, chosen: Mapping[str, str], cursor: str = "", *, each: bool = False
) -> tuple[list[Row], str]:
    """The rows of the runs that are `chosen` by the API's filters, from `cursor` on, and the cursor of the next page,
    empty at the end; with `each`, every run has its own. Raises HttpProblem."""

    async def asked(bounds: Mapping[str, str]) -> Any:
        return await page.get("/history", [*_pairs(chosen), *bounds.items()])

    return await folding.read(asked, cursor, None if each else refusal, "timestamp")


def alike(chosen: Mapping[str, str], row: Row) -> str:
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
