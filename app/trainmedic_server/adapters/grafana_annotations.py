"""Grafana annotations from a run's first change until all is reverted, found again by the tag ``run:…``."""

from __future__ import annotations

import html
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from trainmedic_server import telemetry
from trainmedic_server.adapters.json_endpoint import JsonEndpoint
from trainmedic_server.domain.event_codec import UNDO_OVER, names
from trainmedic_server.domain.event_kinds import Closed, StepResumed, StepStarted
from trainmedic_server.domain.links import run_link
from trainmedic_server.domain.run import Event, Run
from trainmedic_server.errors import PermanentFailure
from trainmedic_server.ports.store import RunStore

_LONGEST_TAG = 100

log = telemetry.logger(__name__)


class GrafanaAnnotations:  # an `engine.event_dispatch.EventListener`
    name = "grafana"
    kinds = UNDO_OVER | names(StepStarted, StepResumed, Closed)
    at_once = 100

    def __init__(self, endpoint: JsonEndpoint, store: RunStore, external_url: str) -> None:
        self._endpoint = endpoint
        self._store = store
        self._external_url = external_url

    async def take(self, events: Sequence[Event]) -> None:
        run_ids = {event.run_id for event in events if event.run_id is not None}
        # a group has one annotation, its parent's
        for run in await self._store.transact(lambda tx: tx.runs({run.alerts_run_id for run in tx.runs(run_ids)})):
            if run.acted_at is None:
                continue
            try:
                await self._write(run, run.acted_at)
            except PermanentFailure as error:
                log.warning("skipping annotation", run_id=run.id, error=str(error))

    async def _write(self, run: Run, acted_at: datetime) -> None:
        ended_at = given_back_at(run)
        tag = f"run:{run.id}"[:_LONGEST_TAG]
        query = urlencode([("tags", "trainmedic"), ("tags", tag), ("type", "annotation"), ("limit", "1")])
        found = await self._endpoint.send("GET", f"/api/annotations?{query}", None)
        if not found:
            await self._endpoint.send("POST", "/api/annotations", self._annotation(run, acted_at, ended_at, tag))
        elif ended_at is not None:
            change = {"timeEnd": _milliseconds(ended_at), "text": self._text(run)}
            await self._endpoint.send("PATCH", f"/api/annotations/{int(found[0]['id'])}", change)

    def _annotation(self, run: Run, acted_at: datetime, ended_at: datetime | None, tag: str) -> dict[str, Any]:
        target = run.target
        parts = target.parts.items() if target else ()
        tags = ["trainmedic", f"playbook:{run.playbook}", *(f"{name}:{value}" for name, value in parts if value), tag]
        end = {} if ended_at is None else {"timeEnd": _milliseconds(ended_at)}
        cut = [each[:_LONGEST_TAG] for each in tags]
        return {"time": _milliseconds(acted_at), **end, "tags": cut, "text": self._text(run)}

    def _text(self, run: Run) -> str:
        text = html.escape(f"{run.playbook} on {run.target_key}: {run.action_taken or run.status}")
        link = run_link(self._external_url, run.id)
        return f'<a href="{html.escape(link)}">{text}</a>' if link else text


def given_back_at(run: Run) -> datetime | None:
    """Return when all was reverted, else the run's end; None if the run is open or has a pending undo."""
    if run.is_open or run.owes_undo:
        return None
    return run.undone_at or run.ended_at


def _milliseconds(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)
