from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from markupsafe import Markup
from starlette.responses import Response

from trainmedic_core import gpu_names
from trainmedic_logs.diagnosis.advice import MEANS
from trainmedic_server.console import folding, log_page, pictures
from trainmedic_server.console.page_request import PageRequest
from trainmedic_server.console.rank_losses import losses_of
from trainmedic_server.http.problems import HttpProblem
from trainmedic_server.presentation import times

# Slow parts are read only with the query parameter `whole`. The shown page requests them so (hx-get, "load").

_MOST_FINDINGS = 20
_CURVES_SINCE = "6h"
JOB_LABELS = {
    "world_size": "Ranks",
    "namespace": "Namespace",
    "version": "SDK",
    "interrupts_hangs": "Interrupts hangs",
    "launcher": "Launcher",
}
"""Reported fields among the facts. The others are folded."""
NODE_LABELS = {"version": "Agent", "driver": "GPU driver", "policy": "Policy"}
_LARGEST = 1e15  # larger numbers are no reading, and may be too large for a float
_RACK = re.compile(r"(?P<rack>.+?)[-_.]?\d+$")


async def jobs(page: PageRequest) -> Response:
    listed = await _all_items(page, "/jobs")
    present = await page.current_state()
    return await page.page(
        "jobs.html",
        title="Jobs",
        jobs=sorted(listed, key=lambda each: _natural_key(each["name"])),
        changed=_changes_by_target(present.document),
        losses_of=losses_of,
        lost=_lost(present.document, "job"),
    )


async def job(page: PageRequest) -> Response:
    """``whole`` adds the slow curves."""
    name = page.parameters["job"]
    shown = await _item_named(page, "/jobs", name)
    runs, more = await folding.runs(page, {"job": name})
    diagnosis = await page.api.get_or(None, f"/jobs/{name}/diagnosis")
    findings = await log_page.findings_of(page, name, _MOST_FINDINGS)
    if shown is None and not runs and diagnosis is None and not findings:
        raise HttpProblem(
            404,
            f"The job {name} is not connected, and has no runs, verdicts or findings. "
            "Its log may exist: open it from the page Jobs.",
        )
    return await page.page(
        "job.html",
        title=f"Job {name}",
        name=name,
        job=shown,
        runs=runs,
        more=more,
        alike=partial(folding.alike_runs, {"job": name}),
        diagnosis=diagnosis,
        advice_means=MEANS,
        findings=findings,
        most_findings=_MOST_FINDINGS,
        losses=losses_of(shown),
        changed=_changes_by_target((await page.current_state()).document).get(f"job:{name}", []),
        whole="whole" in page.query,
        curves=await _curves(page, name) if "whole" in page.query else None,
        labels=JOB_LABELS,
    )


async def _curves(page: PageRequest, name: str) -> Mapping[str, Any]:
    answer = await page.api.get(f"/jobs/{name}/curves", {"since": _CURVES_SINCE})
    history = await page.api.get("/history", {"job": name, "since": _CURVES_SINCE, "limit": "60"})
    marks = list(_marks(history["items"]))
    curves = [pictures.curve(each["name"], each["points"], each["unit"], marks) for each in answer["curves"]]
    return {**answer, "pictures": [picture for picture in curves if picture]}


def _marks(runs: Iterable[Mapping[str, Any]]) -> Iterator[pictures.Mark]:
    for run in runs:
        if run["status"] == "not_started":
            continue
        began, undone = times.read(run["timestamp"]), times.read(run.get("undone_at"))
        did = run.get("action_taken") or run["alert_name"]
        if began is not None:
            yield pictures.Mark(began.timestamp(), did, "bad" if run["status"] == "failed" else "act")
        if undone is not None:
            yield pictures.Mark(undone.timestamp(), "reverted", "back")


def _reported_gpus(agent: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Omit members of a wrong type."""
    gpus = agent["details"].get("gpus")
    cards = (gpu for gpu in gpus if isinstance(gpu, Mapping)) if isinstance(gpus, list) else ()
    return [{name: value for name, value in gpu.items() if _is_of_gpu(name, value)} for gpu in cards]


def _is_of_gpu(name: str, value: Any) -> bool:
    match name:
        case "uuid":
            return isinstance(value, str)
        case "pods":
            return isinstance(value, list)
        case "index" | "power_limit_watts" | "max_limit_watts" | "default_limit_watts":
            return isinstance(value, int | float) and abs(value) < _LARGEST
        case _:
            return True


async def nodes(page: PageRequest) -> Response:
    agents = await _all_items(page, "/agents")
    present = await page.current_state()
    racks = _racks(agents)
    changed = _changes_by_target(present.document)
    return await page.page(
        "nodes.html",
        title="Nodes and GPUs",
        racks=racks,
        changed=changed,
        lost=_lost(present.document, "agent"),
        gpus_of=_reported_gpus,
    )


def _racks(agents: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return nodes by the beginning of their names, lone ones under ""."""
    racks: dict[str, list[Mapping[str, Any]]] = {}
    for agent in sorted(agents, key=lambda each: _natural_key(each["name"])):
        match = _RACK.fullmatch(agent["name"])
        racks.setdefault(match["rack"] if match else agent["name"], []).append(agent)
    shared = {rack: members for rack, members in racks.items() if len(members) > 1}
    alone = [agent for members in racks.values() if len(members) == 1 for agent in members]
    return {**shared, **({"": alone} if alone else {})}


async def node(page: PageRequest) -> Response:
    name = page.parameters["node"]
    agent = await _item_named(page, "/agents", name)
    runs, more = await folding.runs(page, {"node": name})
    if agent is None and not runs:
        raise HttpProblem(404, f"The agent of node {name} is not connected, and no run was on this node.")
    present = await page.current_state()
    return await page.page(
        "node.html",
        title=f"Node {name}",
        name=name,
        agent=agent,
        runs=runs,
        more=more,
        alike=partial(folding.alike_runs, {"node": name}),
        changed=_changes_by_target(present.document),
        readings=await _readings(page, name) if agent is not None and "whole" in page.query else None,
        labels=NODE_LABELS,
        gpus=_reported_gpus(agent) if agent is not None else [],
        uuid_key=gpu_names.uuid_key,
        curve_of=_small_curve,
    )


async def _readings(page: PageRequest, node: str) -> Mapping[str, Any]:
    answer = await page.api.get(f"/agents/{node}/readings")
    return {**answer, "gpus": [{**each, "key": gpu_names.uuid_key(each["uuid"])} for each in answer["gpus"]]}


def _small_curve(curve: Mapping[str, Any]) -> Markup:
    """Return nothing if the value did not change."""
    values = [value for _, value in curve["points"] if value is not None]
    if not values or min(values) == max(values):
        return Markup("")
    name, span = curve["name"], f"{min(values):.0f} to {max(values):.0f} {curve['unit']}"
    began = pictures.clock(curve["points"][0][0])
    text = Markup('<div class="dim">{}<span class="num">{} since {}</span></div>')
    return text.format(pictures.spark(values, f"{name}: {span}"), span, began)


async def _all_items(page: PageRequest, path: str) -> list[Mapping[str, Any]]:
    listed = await page.api.get(path)
    items = list(listed["items"])
    while listed.get("next"):
        listed = await page.api.get(path, {"cursor": listed["next"]})
        items += listed["items"]
    return items


async def _item_named(page: PageRequest, path: str, name: str) -> Mapping[str, Any] | None:
    return next(iter((await page.api.get(path, {"name": name}))["items"]), None)


def _changes_by_target(document: Mapping[str, Any] | None) -> dict[str, list[Mapping[str, Any]]]:
    by_target: dict[str, list[Mapping[str, Any]]] = {}
    for change in (document or {}).get("changed", []):
        by_target.setdefault(change["target"], []).append(change)
    return by_target


def _lost(document: Mapping[str, Any] | None, kind: str) -> list[Mapping[str, Any]]:
    lost: Iterable[Mapping[str, Any]] = (document or {}).get("lost", [])
    return [each for each in lost if each["kind"] == kind]


def _natural_key(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]
