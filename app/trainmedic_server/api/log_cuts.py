"""``GET /agents/log-cuts``."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import Annotated

from fastapi import Query, Response
from pydantic import Field

from trainmedic_logs.domain.log_cuts import CutKind, LogCut, cuts_in
from trainmedic_server.api.query_types import Names, PageLimit
from trainmedic_server.api.view import ApiModel, View
from trainmedic_server.http.api_routes import ApiRoutes
from trainmedic_server.http.ascii_json import AsciiJson
from trainmedic_server.live.presence_lists import PresenceLists
from trainmedic_server.ports.outside import Presence

JobNames = Annotated[Names, Query(description="Only cuts of these jobs; repeatable.")]
NodeNames = Annotated[Names, Query(description="Only cuts on these nodes; repeatable.")]


class LogCutView(View):
    node: str
    job: str | None = Field(description="Name of the job's directory or pod. Null if the cut is about a user.")
    uid: int | None = Field(description="Owner of the directory or file.")
    what: CutKind = Field(description="The budget that is used up.")
    count: int = Field(description="Files, scans, lines, findings or dumps excluded since then.")
    since: datetime = Field(description="The first of these cuts, after ten minutes without one.")


class LogCutList(ApiModel):
    items: list[LogCutView]
    left_out: int = Field(description="Cuts that match and are not listed.")


def add_to(routes: ApiRoutes, lists: PresenceLists) -> None:
    @routes.read("/agents/log-cuts", summary="Log data excluded by agents", response_model=LogCutList)
    async def log_cuts(limit: PageLimit = 1000, job: JobNames = None, node: NodeNames = None) -> Response:
        """Reports from the last ten minutes, with the newest cuts first."""
        listed = await lists.agents()
        return await asyncio.to_thread(lambda: AsciiJson.of(_listed(listed.presences, limit, job, node)))


def _listed(
    agents: Sequence[Presence], limit: int, jobs: Collection[str] | None, nodes: Collection[str] | None
) -> LogCutList:
    cuts = list(_matching(agents, jobs, nodes))
    shown = heapq.nlargest(limit, cuts, key=lambda cut: (cut.since, cut.count))
    items = [LogCutView.of(cut) for cut in shown]
    return LogCutList(items=items, left_out=len(cuts) - len(items))


def _matching(
    agents: Sequence[Presence], jobs: Collection[str] | None, nodes: Collection[str] | None
) -> Iterator[LogCut]:
    for agent in agents:
        if nodes is None or agent.name in nodes:
            yield from (cut for cut in cuts_in(agent.name, agent.details) if jobs is None or cut.job in jobs)
