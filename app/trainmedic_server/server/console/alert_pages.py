"""The pages about alerts: what waits for an answer, what was heard, and why something did or did not happen."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlencode

from starlette.responses import Response

from trainmedic_server.server.console.page_request import PageRequest
from trainmedic_server.server.problems import HttpProblem

_FILTERS = ("alertname", "label", "status", "reacted", "since", "until")


async def approvals(page: PageRequest) -> Response:
    """Each question with what exactly would be done."""
    listed = await page.get("/approvals")
    return await page.page("approvals.html", title="Approvals", live="now", items=listed["items"])


async def alerts(page: PageRequest) -> Response:
    """Every alert that was heard, and what was made of it."""
    chosen = {name: value for name in _FILTERS if (value := page.query.get(name, "").strip())}
    query: list[tuple[str, Any]] = list(chosen.items())
    query += [("limit", "60"), *([("cursor", page.query["cursor"])] if page.query.get("cursor") else [])]
    listed = await page.get("/alerts", query)
    return await page.page(
        "alerts.html",
        title="Alerts",
        items=listed["items"],
        chosen=chosen,
        more=urlencode({**chosen, "cursor": listed["next"]}) if listed["next"] else "",
        api_text=urlencode(chosen),
    )


async def explain(page: PageRequest) -> Response:
    """A form for an alert, in any form; and with one, sent by it or in the address, what would be done about it now."""
    pasted, wrong, answer = page.query.get("alert", "").strip(), "", None
    if name := page.query.get("alertname", "").strip():
        labels = dict(piece.partition("=")[::2] for piece in page.query.get("labels", "").split())
        pasted = pasted or json.dumps({"labels": {"alertname": name, **labels}})
    if pasted:
        try:
            body = json.loads(pasted)
        except ValueError as error:
            wrong = f"This is not JSON: {error}"
        else:
            query = {name: value for name in ("at",) if (value := page.query.get(name, "").strip())}
            query |= {"test": "true"} if page.query.get("test") else {}
            try:
                answer = await page.api.ask(page.principal, "POST", "/explain", query, body)
            except HttpProblem as problem:
                wrong = problem.detail
    return await page.page("explain.html", title="Why", path="/explain", pasted=pasted, wrong=wrong, answer=answer)
