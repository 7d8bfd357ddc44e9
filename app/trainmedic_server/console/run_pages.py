from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup
from starlette.responses import RedirectResponse, Response

from trainmedic_core import gpu_names
from trainmedic_core.problems import did_you_mean
from trainmedic_core.target import PARTS
from trainmedic_server.console import folding, pictures
from trainmedic_server.console.page_request import PageRequest
from trainmedic_server.console.playbook_pages import UNCOUNTED
from trainmedic_server.domain import effect as effects
from trainmedic_server.domain.run import Status
from trainmedic_server.http.problems import HttpProblem
from trainmedic_server.presentation import times
from trainmedic_server.presentation.rows import Row

_DEFAULT_SINCE = "24h"
_FILTERS = (
    *("status", "playbook", "decision", *PARTS, "alertname", "since", "until", "owes_undo"),
    *("target", "open", "by", "parent"),
)
# In the text field of the page.
_FILTER_ALIASES = {"alert": "alertname", "owed": "owes_undo"}
_OPTIONS = {"alertname": "alert"}  # of `trainmedic history`, with another name than the filter
_FLAGS = {"open": "--open", "owes_undo": "--owes-undo"}
SAVED = (
    ("Last 24 h", ""),
    ("Open", "open=true&since="),
    ("Failed 24 h", "status=failed&since=24h"),
    ("Undo pending", "owes_undo=true&since="),
    ("Blocked 24 h", "status=not_started&since=24h"),
)


async def runs(page: PageRequest) -> Response:
    (chosen, text), wrong = _conditions(page.query), ""
    rows: list[Row] = []
    cursor, after, each = page.query.get("cursor", ""), "", page.query.get("each", "")

    try:
        _check_filter_text(text)
        rows, after = await folding.runs(page, chosen, cursor, each=bool(each))
    except HttpProblem as problem:
        if problem.status != HTTPStatus.UNPROCESSABLE_ENTITY:
            raise
        wrong = problem.detail
    shown = {**chosen, **({"each": each} if each else {})}
    books = await page.api.get("/playbooks", UNCOUNTED)
    return await page.page(
        "runs.html",
        title="Runs",
        live="" if cursor or wrong else "runs",
        # While the user types, the script shows only successful pages.
        status=422 if wrong and "hx-request" not in page.request.headers else 200,
        wrong=wrong,
        rows=rows,
        alike=partial(folding.alike_runs, chosen),
        more=urlencode({**shown, "cursor": after}) if after else "",
        chosen=chosen,
        text=text,
        statuses=[status.value for status in Status],
        playbooks=[book["name"] for book in books["items"]],
        saved=SAVED,
        api_text=urlencode(folding.pairs(chosen)),
        cli=_command(chosen),
    )


async def run(page: PageRequest) -> Response:
    shown = await page.api.get(f"/history/{page.parameters['run']}")
    return await page.page(
        "run.html",
        title=page.renderer.titled(shown["playbook"], shown["target"]),
        live=f"run:{shown['run_id']}",
        **await story(page.api.get_or, shown),
    )


async def story(get_or: Any, shown: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of ``run_story.html``."""
    book = await get_or(None, f"/playbooks/{shown['playbook']}", UNCOUNTED)
    before, after = await _neighbours(get_or, shown)
    return {
        "run": shown,
        "changed_since": bool(book) and book["version"] != shown["version"],
        "before": before,
        "after": after,
        "folded_events": folded_events(shown["events"]),
        "effect_picture": effect_picture(shown.get("effect")),
        "reported": await reported_curves(get_or, shown),
    }


async def short_link(page: PageRequest) -> Response:
    shown = await page.api.get(f"/history/{page.parameters['run']}")
    return RedirectResponse(f"/runs/{shown['run_id']}", 303)


def folded_events(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Fold repeated events in a row into the last, with their number as ``times``."""
    shown: list[Mapping[str, Any]] = []
    for (kind, _), alike in itertools.groupby(events, key=lambda event: (event["kind"], event["data"].get("step"))):
        row = list(alike)
        if kind in ("alert_repeated", "joined", "attempt_waits") and len(row) > 1:
            shown.append({**row[-1], "times": len(row)})
        else:
            shown += row
    return shown


def effect_picture(effect: Mapping[str, Any] | None) -> Markup:
    """Return the metric's curve around the act. Empty without points."""
    points = [(at, value) for at, value in (effect or {}).get("series") or []]
    if effect is None or not points:
        return Markup("")
    return pictures.curve("Metric of the alert", points, marks=_marks(effect, {}), limit=effect.get("limit"))


async def reported_curves(get_or: Any, shown: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return figures of the run's job or GPU around its first act, with pictures. None if the alert's metric has a
    picture, if nothing was changed, or without two values.
    """
    effect, who = shown.get("effect"), "the job"
    acted = times.read((effect or {}).get("acted_at"))
    if effect is None or effect.get("series") or acted is None:
        return None
    begin, end = acted - effects.BEFORE, acted + effects.AFTER
    if shown["job"]:
        span = {"since": begin.isoformat(), "until": end.isoformat()}
        figures = await get_or(None, f"/jobs/{shown['job']}/curves", span)
        curves = (figures or {}).get("curves", [])
    elif shown["gpu"] and shown["node"]:
        who = "the node's agent"
        figures = await get_or(None, f"/agents/{shown['node']}/readings")
        key = gpu_names.uuid_key(shown["gpu"])
        gpus = (figures or {}).get("gpus", [])
        curves = [curve for gpu in gpus if gpu_names.uuid_key(gpu["uuid"]) == key for curve in gpu["curves"]]
    else:
        return None
    around = timedelta(seconds=30)
    marks = _marks(effect, shown)
    drawn = [
        pictures.curve(each["name"], _within(each["points"], begin - around, end + around), each["unit"], marks)
        for each in curves
    ]
    visible = [picture for picture in drawn if picture]
    return {**figures, "pictures": visible, "who": who} if visible else None


def _within(points: Iterable[tuple[float, float | None]], begin: datetime, end: datetime) -> pictures.Points:
    first, last = begin.timestamp(), end.timestamp()
    return [(at, value) for at, value in points if first <= at <= last]


def _marks(effect: Mapping[str, Any], run: Mapping[str, Any]) -> list[pictures.Mark]:
    acted, undone = times.read(effect.get("acted_at")), times.read(run.get("undone_at"))
    marks = [pictures.Mark(acted.timestamp(), "the act")] if acted is not None else []
    return marks if undone is None else [*marks, pictures.Mark(undone.timestamp(), "reverted", "back")]


async def _neighbours(get_or: Any, shown: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the runs before and after this one on its target, None if not among the newest hundred."""
    where = {name: shown[name] for name in PARTS if shown[name]}
    if not where:
        return None, None
    listed = await get_or({"items": []}, "/history", {**where, "limit": "100"})
    ids = [item["run_id"] for item in listed["items"] if item["target"] == shown["target"]]
    if shown["run_id"] not in ids:
        return None, None
    place = ids.index(shown["run_id"])
    return (ids[place + 1] if place + 1 < len(ids) else None), (ids[place - 1] if place else None)


def _conditions(query: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return the API's filters, by field or as ``name:value`` in the text field; and that text."""
    chosen = {name: value for name in _FILTERS if (value := query.get(name, "").strip())}
    text = query.get("q", "").strip()
    for word in text.split():
        name, colon, value = word.partition(":")
        name = _FILTER_ALIASES.get(name, name)
        if colon and value and name in _FILTERS:
            chosen[name] = value
    if "since" not in query and not text and not chosen.keys() - {"since"}:
        chosen["since"] = _DEFAULT_SINCE
    return chosen, text


def _check_filter_text(text: str) -> None:
    for word in text.split():
        name, colon, value = word.partition(":")
        if not (colon and value and _FILTER_ALIASES.get(name, name) in _FILTERS):
            hint = (did_you_mean(name, _FILTERS) if colon else "") or "."
            names = ", ".join(_FILTERS)
            detail = f"“{word}” is not a filter{hint} Filters are written as name:value; the names are {names}."
            raise HttpProblem(HTTPStatus.UNPROCESSABLE_ENTITY, detail)


def _command(chosen: Mapping[str, str]) -> str:
    """Return "" for filters that the command lacks."""
    words = ["trainmedic", "history"]
    for name, value in folding.pairs(chosen):
        if name not in _FLAGS:
            words += [f"--{_OPTIONS.get(name, name)}", value]
        elif value == "true":
            words.append(_FLAGS[name])
        else:
            return ""
    return shlex.join(words)
