from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from trainmedic_server.console import folding
from trainmedic_server.console.page_request import PageRequest
from trainmedic_server.http.problems import HttpProblem

UNCOUNTED = {"counted": "false"}  # without the numbers of runs, which are slow
_MOST_OFFERED = 300  # targets in the form
# Where the targets of a kind are listed, and an example.
_LISTED = {"gpu": ("/agents", "gpu:node-1/0"), "node": ("/agents", "node:node-1"), "job": ("/jobs", "job:llm-1")}
_INPUT = "input."  # begins the form fields of a playbook's inputs


async def playbooks(page: PageRequest) -> Response:
    """``whole`` adds the slow counts."""
    whole = "whole" in page.query
    listed = await page.api.get("/playbooks", None if whole else UNCOUNTED)
    return await page.page(
        "playbooks.html", title="Playbooks", items=listed["items"], errors=listed["errors"], whole=whole
    )


async def playbook(page: PageRequest, **more: Any) -> Response:
    """``whole`` adds the slow versions. `more` is a form's result."""
    name = page.parameters["playbook"]
    shown = await page.api.get(f"/playbooks/{name}", UNCOUNTED)
    runs, older = await folding.runs(page, {"playbook": name})
    versions, wrong = None, ""
    if asked := {end: value for end in ("before", "after") if (value := page.query.get(end, "").strip())}:
        try:
            versions = await page.api.get(f"/playbooks/{name}/versions", asked)
        except HttpProblem as problem:
            wrong = problem.detail
    if versions is None and ("whole" in page.query or wrong):
        versions = await page.api.get(f"/playbooks/{name}/versions")
    return await page.page(
        "playbook.html",
        title=f"Playbook {name}",
        path=f"/playbooks/{name}",
        book=shown,
        runs=runs,
        more=older,
        alike=partial(folding.alike_runs, {"playbook": name}),
        versions=versions,
        wrong_version=wrong,
        example=_LISTED[kind][1] if (kind := shown["target"]) in _LISTED else "cluster",
        targets=await _targets(page, shown["target"]) if page.is_operator else (),
        **more,
    )


async def run_tests(page: PageRequest, _: Mapping[str, str]) -> Response:
    path = f"/playbooks/{page.parameters['playbook']}/test"
    try:
        return await playbook(page, tests=await page.api.post(path))
    except HttpProblem as problem:
        return await playbook(page, no_tests=problem.detail)


async def dry_run(page: PageRequest, fields: Mapping[str, str]) -> Response:
    try:
        body = start_body(page.parameters["playbook"], fields) | {"dry_run": True}
        preview = await page.api.post("/runs", body)
    except HttpProblem as problem:
        return await playbook(page, asked=fields, cannot=problem.detail)
    return await playbook(page, asked=fields, preview=preview, key=secrets.token_hex(16))


def start_body(name: str, fields: Mapping[str, str]) -> dict[str, Any]:
    labels = labels_of(fields.get("labels", ""))
    given = {
        field.removeprefix(_INPUT): value
        for field, value in fields.items()
        if field.startswith(_INPUT) and value.strip()
    }
    body = {"playbook": name, "target": fields.get("target", "").strip() or None, "labels": labels}
    return body | ({"inputs": given} if given else {})


def labels_of(text: str) -> dict[str, str]:
    pairs = [(piece, *piece.partition("=")) for piece in text.replace(",", " ").split()]
    for piece, name, _, value in pairs:
        if not name or not value:  # no alert has a label without a value
            raise HttpProblem(
                HTTPStatus.UNPROCESSABLE_ENTITY,
                f"labels: {piece!r} is not NAME=VALUE. Values have no spaces or commas.",
            )
    return {name: value for _, name, _, value in pairs}


async def _targets(page: PageRequest, kind: str) -> list[str]:
    if kind == "cluster":
        return ["cluster"]
    if kind not in _LISTED:
        return []
    items = (await page.api.get(_LISTED[kind][0]))["items"]
    named = _gpus(items) if kind == "gpu" else (f"{kind}:{each['name']}" for each in items)
    return [target for target, _ in zip(named, range(_MOST_OFFERED), strict=False)]


def _gpus(agents: list[Mapping[str, Any]]) -> Iterator[str]:
    for agent in agents:
        gpus = agent["details"].get("gpus")
        for number, gpu in enumerate(gpus if isinstance(gpus, list) else ()):
            index = gpu.get("index", number) if isinstance(gpu, dict) else number
            yield f"gpu:{agent['name']}/{index}"
