from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from starlette.responses import Response

from trainmedic_server.console import pictures
from trainmedic_server.console.page_request import PageRequest
from trainmedic_server.console.playbook_pages import UNCOUNTED
from trainmedic_server.http.problems import HttpProblem

_SPANS = ("24h", "7d", "30d", "90d")


async def now(page: PageRequest) -> Response:
    return await page.page("now.html", title="Now", live="now")


async def settings(page: PageRequest, tested: Mapping[str, Any] | None = None) -> Response:
    """`tested` is the outcome of a test message that the page's form sent."""
    ready = await page.api.get("/ready")
    pauses = await page.api.get_or({"items": []}, "/pauses")
    sessions = await page.api.get_or(None, "/sessions")
    books = await page.api.get("/playbooks", UNCOUNTED)
    health = await page.api.get("/health")
    channels = await page.api.get("/channels")
    return await page.page(
        "settings.html",
        title="Settings",
        path="/settings",
        channels=channels["items"],
        tested=tested,
        ready=ready,
        pauses=pauses["items"],
        sessions=sessions["items"] if sessions else None,
        errors=books["errors"],
        health=health,
        present=(await page.current_state()).document,
    )


async def report(page: PageRequest) -> Response:
    """``whole`` adds the slow report."""
    since = page.query.get("since", "7d")
    document = await page.api.get("/report", {"since": since}) if "whole" in page.query else None
    by_day = [
        pictures.Day(
            each["day"],
            {"job failures": each["failures"], "repairs": each["succeeded"], "failed repairs": each["failed"]},
        )
        for each in (document or {}).get("days", ())
    ]
    picture = pictures.days("By day", by_day)
    return await page.page("report.html", title="Report", report=document, since=since, spans=_SPANS, picture=picture)


async def audit(page: PageRequest) -> Response:
    chosen = {name: value for name in ("by", "since", "until") if (value := page.query.get(name, "").strip())}
    before = {"before": page.query["before"]} if page.query.get("before") else {}
    listed: Mapping[str, Any] = {"items": [], "next": None}
    wrong = ""
    try:
        listed = await page.api.get("/audit", {**chosen, **before})
    except HttpProblem as problem:
        if problem.status != HTTPStatus.UNPROCESSABLE_ENTITY:
            raise
        wrong = problem.detail
    return await page.page(
        "audit.html",
        title="Audit",
        status=422 if wrong else 200,
        wrong=wrong,
        items=listed["items"],
        chosen=chosen,
        more=urlencode({**chosen, "before": listed["next"]}) if listed["next"] else "",
        api_text=urlencode(chosen),
    )
