"""``GET /audit``: actions of people. An export's last hash, stored elsewhere, proves that the file is unchanged."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import Query
from pydantic import Field

from trainmedic_core.plain_text import json_bytes
from trainmedic_server.api import views
from trainmedic_server.api.exports import AS_STREAM, Accept, Exports, stream_type
from trainmedic_server.api.query_types import Name, PageLimit
from trainmedic_server.api.times import TimeText, span_of
from trainmedic_server.api.view import View
from trainmedic_server.http.api_routes import ApiRoutes, RouteParts
from trainmedic_server.ports.store import ActFilter, History

_BATCH = 500  # events read at once
_FIRST_HASH = "0" * 64


class AuditLine(View):  # of an export
    seq: int
    at: str
    actor: str
    kind: str
    run_id: str | None
    data: dict[str, Any]
    previous: str
    hash: str


class ActPage(View):
    items: list[views.EventView]
    next: int | None = Field(description="`before` of the next page; null on the last.")


def router(history: History, parts: RouteParts) -> ApiRoutes:
    routes = ApiRoutes("history", parts.auth)
    exports: Exports[AuditLine] = Exports(parts.limits, AuditLine, lambda line: line)

    @routes.read("/audit", summary="What people did", response_model=ActPage, responses=AS_STREAM)
    async def acts(
        by: Annotated[Name | None, Query(description="Of this person alone.")] = None,
        before: Annotated[int | None, Query(ge=1, le=(1 << 63) - 1, description="`next` of the page before.")] = None,
        since: TimeText | None = None,
        until: TimeText | None = None,
        limit: PageLimit = 100,
        accept: Accept = None,
    ) -> Any:
        """Every event whose actor is not the server: approvals, operator commands, pauses, sign-ins.

        With `Accept: application/x-ndjson` or `text/csv`, all matches, newest first. Each line has a SHA-256 over
        itself and the hash of the line before.
        """
        wanted = ActFilter(by, *span_of(since, until, parts.clock.now()))
        if kind := stream_type(accept):
            return await exports.response(_chained(history, wanted, before), kind)
        async with parts.reads.take():
            acts_read = await history.acts_of_people(wanted, before, limit)
        following = acts_read[-1].seq if len(acts_read) == limit else None
        return ActPage(items=[views.event(each) for each in acts_read], next=following)

    return routes


def line_hash(previous: str, entry: dict[str, Any]) -> str:
    ordered = {name: entry[name] for name in sorted(entry)}
    return hashlib.sha256(previous.encode() + json_bytes(ordered)).hexdigest()


async def _chained(history: History, wanted: ActFilter, before: int | None) -> AsyncGenerator[AuditLine, None]:
    previous = _FIRST_HASH
    while True:
        batch = await history.acts_of_people(wanted, before, _BATCH)
        for event in batch:
            shown = views.event(event).model_dump(mode="json")
            entry = {name: shown[name] for name in ("seq", "at", "actor", "kind", "run_id", "data")}
            digest = line_hash(previous, entry)
            yield AuditLine(**entry, previous=previous, hash=digest)
            previous = digest
        if len(batch) < _BATCH:
            return
        before = batch[-1].seq
