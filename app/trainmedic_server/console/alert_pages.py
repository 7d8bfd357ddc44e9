from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from starlette.responses import RedirectResponse, Response

from trainmedic_server.console import folding
from trainmedic_server.console.page_request import PageRequest
from trainmedic_server.http.problems import HttpProblem
from trainmedic_server.presentation.rows import Row

_BEGAN = ("started", "joined")
_FILTERS = ("alertname", "label", "status", "reacted", "since", "until")


async def approvals(page: PageRequest) -> Response:
    listed = await page.api.get("/approvals")
    return await page.page("approvals.html", title="Approvals", live="now", items=listed["items"])


async def alerts(page: PageRequest) -> Response:
    chosen = {name: value for name in _FILTERS if (value := page.query.get(name, "").strip())}
    each = page.query.get("each", "")

    async def page_of(bounds: Mapping[str, str]) -> Any:
        return await page.api.get("/alerts", {**chosen, **bounds})

    rows: list[Row] = []
    after = wrong = ""
    try:
        rows, after = await folding.read_rows(
            page_of, page.query.get("cursor", ""), None if each else _fold_key, "last_heard"
        )
    except HttpProblem as problem:
        if problem.status != HTTPStatus.UNPROCESSABLE_ENTITY:
            raise
        wrong = problem.detail
    shown = {**chosen, **({"each": each} if each else {})}
    return await page.page(
        "alerts.html",
        title="Alerts",
        status=422 if wrong else 200,
        wrong=wrong,
        rows=rows,
        chosen=chosen,
        alike=partial(_query_of_alike, chosen),
        more=urlencode({**shown, "cursor": after}) if after else "",
        api_text=urlencode(chosen),
    )


async def explain(page: PageRequest) -> Response:
    pasted, wrong, answer = page.query.get("alert", "").strip(), "", None
    if name := page.query.get("alertname", "").strip():
        labels = dict(piece.partition("=")[::2] for piece in page.query.get("labels", "").split())
        pasted = pasted or json.dumps({"labels": {"alertname": name, **labels}})
    if pasted:
        try:
            body = json.loads(pasted)
        except (ValueError, RecursionError) as error:
            wrong = f"This is not JSON: {error}"
        else:
            query = {name: value for name in ("at",) if (value := page.query.get(name, "").strip())}
            query |= {"test": "true"} if page.query.get("test") else {}
            try:
                answer = await page.api.ask("POST", "/explain", query, body)
            except HttpProblem as problem:
                wrong = problem.detail
    return await page.page("explain.html", title="Why", path="/explain", pasted=pasted, wrong=wrong, answer=answer)


async def why(page: PageRequest) -> Response:
    query = page.request.url.query
    return RedirectResponse(f"/explain{f'?{query}' if query else ''}", HTTPStatus.SEE_OTHER)


def _fold_key(item: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return what equal alerts share; None for one that started or joined a run."""
    decisions = [(each["playbook"], each["decision"]) for each in item["reactions"]]
    if any(decision in _BEGAN for _, decision in decisions):
        return None
    return item["alert_name"], item["status"], item["reacted"], item["reason"], *decisions


def _query_of_alike(chosen: Mapping[str, str], row: Row) -> str:
    reacted = "true" if row.item["reacted"] else "false"
    same = {"alertname": row.item["alert_name"], "status": row.item["status"], "reacted": reacted}
    return urlencode({**chosen, **same, "each": "true"})
