"""The pages about playbooks."""

from __future__ import annotations

from starlette.responses import Response

from trainmedic_server.server.console.page_request import PageRequest

UNCOUNTED = {"counted": "false"}


async def playbooks(page: PageRequest) -> Response:
    """All that are loaded, and files that could not be. Counting their runs takes a while in a long history, so the
    page asks for that once the rest is there."""
    whole = "whole" in page.query
    listed = await page.get("/playbooks", None if whole else UNCOUNTED)
    return await page.page(
        "playbooks.html", title="Playbooks", items=listed["items"], errors=listed["errors"], whole=whole
    )


async def playbook(page: PageRequest) -> Response:
    """One: its text with a mark at each line, and what it did."""
    name = page.parameters["playbook"]
    shown = await page.get(f"/playbooks/{name}", UNCOUNTED)
    runs = await page.get("/history", {"playbook": name, "limit": "50"})
    return await page.page("playbook.html", title=f"Playbook {name}", book=shown, runs=runs["items"])
