"""The first page: what waits for a person, what is changed and when it is given back, what comes next."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from starlette.responses import Response

from trainmedic_server.server.console.page_request import PageRequest


async def now(page: PageRequest) -> Response:
    """Always fresh; it changes while it is open."""
    return await page.page("now.html", title="Now", live="now", **await now_parts(page.get_or))


async def now_parts(get_or: Any) -> dict[str, Any]:
    """What its template shows."""
    present, approvals, recent = await asyncio.gather(
        get_or({}, "/now"),
        get_or({"items": []}, "/approvals"),
        get_or({"items": []}, "/history", {"since": "1h", "limit": "500"}),
    )
    counts: Counter[str] = Counter()
    for item in recent["items"]:
        is_reason = item["status"] == "not_started"
        counts[item["decision"] if is_reason else item["status"]] += 1
    return {
        "present": present,
        "approvals": approvals["items"],
        "hour": counts.most_common(),
        "hour_more": recent.get("next"),
    }
