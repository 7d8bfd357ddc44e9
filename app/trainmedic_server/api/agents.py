"""``GET /agents``: connected node agents."""

from __future__ import annotations

import asyncio

from fastapi import Depends, Response
from pydantic import Field

from trainmedic_server.api import log_cuts
from trainmedic_server.api.query_types import PageCursor, PageLimit
from trainmedic_server.api.view import ApiModel
from trainmedic_server.auth.auth import Authenticator, requires
from trainmedic_server.auth.tokens import TokenRole
from trainmedic_server.http.api_routes import ApiRoutes
from trainmedic_server.http.ascii_json import AsciiJson
from trainmedic_server.http.problems import responses
from trainmedic_server.live.presence_lists import PresenceLists, PresenceNames, page
from trainmedic_server.live.presences import PresenceView, members_of
from trainmedic_server.ports.outside import CommandBus


class PresenceList(ApiModel):
    items: list[PresenceView]
    next: str | None = Field(None, description="Cursor of the next page; missing on the last.")


def router(bus: CommandBus, lists: PresenceLists, auth: Authenticator) -> ApiRoutes:
    routes = ApiRoutes("operations", [Depends(requires(auth, TokenRole.VIEWER))])

    @routes.get(
        "/agents",
        summary="Connected node agents",
        response_model=PresenceList,
        responses=responses(401, 403, 422, 503),
    )
    async def agents(limit: PageLimit = 1000, cursor: PageCursor = None, name: PresenceNames = None) -> Response:
        """By name, at most some seconds old."""
        listed = await lists.agents()
        shown = page(listed.presences, limit, cursor, name)

        def rendered() -> Response:
            items = [
                PresenceView(**members_of(agent, listed.against.get(agent.name, ()), bus.is_signed))
                for agent in shown.presences
            ]
            page_of = PresenceList(items=items, next=shown.next) if shown.next else PresenceList(items=items)
            return AsciiJson.of(page_of, exclude_unset=True)

        return await asyncio.to_thread(rendered)  # the answer can have several MB

    log_cuts.add_to(routes, lists)
    return routes
