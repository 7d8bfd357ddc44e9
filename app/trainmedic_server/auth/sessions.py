"""Routes of browser sessions."""

from __future__ import annotations

from datetime import datetime

from fastapi import Depends, Path, Response

from trainmedic_server.api.view import View
from trainmedic_server.auth.auth import Principal, requires
from trainmedic_server.auth.browser_sessions import Sessions
from trainmedic_server.auth.tokens import TokenRole
from trainmedic_server.errors import NotFound
from trainmedic_server.http.api_routes import ApiRoutes, RouteParts
from trainmedic_server.http.problems import responses
from trainmedic_server.ports.sessions import Session


class SessionView(View):
    id: str
    name: str
    created_at: datetime
    ends_at: datetime
    address: str
    browser: str


class SessionList(View):
    items: list[SessionView]


def router(sessions: Sessions, parts: RouteParts) -> ApiRoutes:
    routes = ApiRoutes("operations", parts.auth)

    @routes.read("/sessions", summary="The browsers that are signed in")
    async def listed(principal: Principal = Depends(routes.viewer)) -> SessionList:
        """An operator sees all sessions, other users their own."""
        return SessionList(items=[SessionView.model_validate(each) for each in _seen_by(principal, sessions)])

    @routes.delete(
        "/sessions/{session_id}",
        summary="End a session",
        status_code=204,
        response_class=Response,
        responses=responses(404),
    )
    async def end(
        session_id: str = Path(pattern=r"^[0-9a-f-]{36}$"),
        principal: Principal = Depends(requires(parts.auth, TokenRole.VIEWER, acts=True)),
    ) -> None:
        """An operator may end any session, other users their own."""
        for session in _seen_by(principal, sessions):
            if session.id == session_id:
                await sessions.end(session, principal.name)
                return
        raise NotFound(f"There is no session {session_id}.")

    return routes


def _seen_by(principal: Principal, sessions: Sessions) -> list[Session]:
    is_operator = principal.may(TokenRole.OPERATOR)
    return [each for each in sessions.all() if is_operator or each.name == principal.name]
