"""What a page is made from: who asks for what, the API, and the templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from trainmedic_server.server.auth import Principal
from trainmedic_server.server.console.inner_api import InnerApi, Query
from trainmedic_server.server.console.rendering import Renderer, page
from trainmedic_server.server.console.standing import ServerStanding
from trainmedic_server.server.tokens import TokenRole


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A request for a page, by somebody who may see it."""

    request: Request
    principal: Principal
    parameters: Mapping[str, str]
    """The named parts of the path."""
    api: InnerApi
    renderer: Renderer
    standing: ServerStanding
    signed_in: bool
    """Whether there is a session that could be ended."""
    query: Mapping[str, str] = field(default_factory=dict)

    async def get(self, path: str, query: Query | None = None) -> Any:
        """What the API has at `path`. Raises HttpProblem."""
        return await self.api.get(self.principal, path, query)

    async def get_or(self, default: Any, path: str, query: Query | None = None) -> Any:
        return await self.api.get_or(default, self.principal, path, query)

    @property
    def is_operator(self) -> bool:
        return self.principal.may(TokenRole.OPERATOR)

    async def page(self, template: str, *, title: str, live: str = "", status: int = 200, **names: Any) -> Response:
        """The page: the frame that all have, with `template` in it. `live` names what it wants to be told of."""
        text = self.renderer.text(
            template,
            title=title,
            live=live,
            me=self.principal,
            is_operator=self.is_operator,
            signed_in=self.signed_in,
            path=self.request.url.path,
            query=self.query,
            query_text=self.request.url.query,
            host=self.request.headers.get("host", "localhost:8080"),
            scheme="https" if self.request.headers.get("x-forwarded-proto") == "https" else "http",
            standing=await self.standing.now(),
            notice=self.query.get("done", "")[:200],
            **names,
        )
        return page(text, status, accepts_gzip=accepts_gzip(self.request))


def accepts_gzip(request: Request) -> bool:
    return "gzip" in request.headers.get("accept-encoding", "")
