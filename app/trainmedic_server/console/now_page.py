"""The first page: what waits for a person, what is changed and when it is given back, what comes next."""

from __future__ import annotations

from starlette.responses import Response

from trainmedic_server.console.page_request import PageRequest


async def now(page: PageRequest) -> Response:
    """It changes while it is open."""
    return await page.page("now.html", title="Now", live="now")
