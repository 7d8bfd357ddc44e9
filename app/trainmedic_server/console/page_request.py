"""Context of a page: request, user, API and templates."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field
from starlette.requests import Request
from starlette.responses import Response

from trainmedic_server.auth.auth import ANONYMOUS, Principal
from trainmedic_server.auth.tokens import TokenRole
from trainmedic_server.console import notices
from trainmedic_server.console.inner_api import InnerApi
from trainmedic_server.console.rendering import Renderer, page
from trainmedic_server.console.standing import ServerStanding, StandingView

_LONGEST_SEQ = 18  # digits


class PageRequest(Struct, frozen=True):
    request: Request
    principal: Principal
    parameters: Mapping[str, str]
    api: InnerApi  # asked by the principal
    renderer: Renderer
    standing: ServerStanding
    signed_in: bool  # by a session, so that the page offers to end it
    query: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_operator(self) -> bool:
        return self.principal.may(TokenRole.OPERATOR)

    async def page(self, template: str, *, title: str, live: str = "", status: int = 200, **names: Any) -> Response:
        """Render `template` in the common frame. `live` is its topic for updates."""
        notice = notices.notice_of(self.request)
        text = self.renderer.text(
            template,
            title=title,
            live=live,
            me=self.principal,
            is_operator=self.is_operator,
            signed_in=self.signed_in,
            path=names.pop("path", self.request.url.path),
            query=self.query,
            query_text=self.request.url.query,
            curl=self._curl,
            standing=await self.current_state(),
            notice=notice,
            **names,
        )
        response = page(text, status, accepts_gzip=accepts_gzip(self.request))
        if notice:
            notices.clear(response)
        return response

    async def current_state(self) -> StandingView:
        return await self.standing.now(since=last_event(self.request.headers.get("last-event-id", "0")) or 0)

    def _curl(self, path: str) -> str:
        base = self.renderer.base
        scheme = "https" if self.request.headers.get("x-forwarded-proto") == "https" else "http"
        token = "" if self.principal is ANONYMOUS else '-H "Authorization: Bearer $TRAINMEDIC_TOKEN" '
        here = base.external_url if base.link else f"{scheme}://{self.request.headers.get('host', 'localhost:8080')}"
        return f"curl -sS {token}{shlex.quote(here + path)}"


def last_event(named: str) -> int | None:
    return int(named) if named.isascii() and named.isdigit() and len(named) <= _LONGEST_SEQ else None


def accepts_gzip(request: Request) -> bool:
    return "gzip" in request.headers.get("accept-encoding", "")
