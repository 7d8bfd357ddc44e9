"""``/login``: a token begins a session, whose secret is in the browser's cookie."""

from __future__ import annotations

from http import HTTPStatus
from urllib.parse import parse_qsl, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.auth.browser_sessions import BASE_COOKIE, COOKIE, LASTS, SECURE_COOKIE, Sessions
from trainmedic_server.auth.tokens import TokenRole
from trainmedic_server.console.page_request import accepts_gzip
from trainmedic_server.console.rendering import Renderer, page
from trainmedic_server.http.body import BodyReader
from trainmedic_server.http.limits import KIB
from trainmedic_server.http.origin_check import refuse_other_sites
from trainmedic_server.http.problems import HttpProblem

FORM_BYTES = 64 * KIB
_MOST_FIELDS = 100
_FORM = "application/x-www-form-urlencoded"


class SignIn:
    def __init__(self, auth: Authenticator, sessions: Sessions, renderer: Renderer, bodies: BodyReader) -> None:
        self._auth = auth
        self._sessions = sessions
        self._renderer = renderer
        self._bodies = bodies

    async def show(self, request: Request) -> Response:
        onward = local_path(request.query_params.get("next"))
        try:
            self._auth.require(request, TokenRole.VIEWER)
        except HttpProblem:
            return self._page(request, onward, "")
        return RedirectResponse(onward, HTTPStatus.SEE_OTHER)

    async def begin(self, request: Request) -> Response:
        refuse_other_sites(request)
        form = dict(await read_fields(self._bodies, request, FORM_BYTES))
        onward = local_path(form.get("next"))
        token = self._auth.token_of(form.get("token", "").strip().encode())
        if token is None:
            return self._page(request, onward, "The token is unknown.")
        if not token.roles - {TokenRole.WEBHOOK} or token.jobs is not None:
            why = "is limited to certain jobs" if token.jobs is not None else "is for Alertmanager's deliveries only"
            return self._page(request, onward, f"The token “{token.name}” {why}. The console needs the role viewer.")
        address = request.client.host if request.client else ""
        secret = await self._sessions.begin(token, address, request.headers.get("user-agent", ""))
        response = RedirectResponse(onward, HTTPStatus.SEE_OTHER)
        secure = is_https(request, self._auth)
        cookie = COOKIE
        if secure:
            cookie = BASE_COOKIE if self._renderer.base.link else SECURE_COOKIE
        response.set_cookie(
            cookie,
            secret,
            max_age=int(LASTS.total_seconds()),
            httponly=True,
            samesite="strict",
            secure=secure,
        )
        return response

    async def end(self, request: Request) -> Response:
        refuse_other_sites(request)
        session = self._sessions.of(request.headers.get("cookie"))
        if session is not None:
            await self._sessions.end(session, session.name)
        response = RedirectResponse("/login", HTTPStatus.SEE_OTHER)
        response.delete_cookie(COOKIE, httponly=True, samesite="strict")
        for name in (SECURE_COOKIE, BASE_COOKIE):
            response.delete_cookie(name, secure=True, httponly=True, samesite="strict")
        return response

    def _page(self, request: Request, onward: str, wrong: str) -> Response:
        text = self._renderer.text("login.html", title="Sign in", onward=onward, wrong=wrong)
        status = HTTPStatus.FORBIDDEN if wrong else HTTPStatus.OK
        return page(text, status, accepts_gzip=accepts_gzip(request))


def is_https(request: Request, auth: Authenticator) -> bool:
    """Return whether the browser uses TLS, also to a proxy: by its Origin, or a trusted proxy's header."""
    if urlsplit(request.headers.get("origin", "")).scheme == "https":
        return True
    return auth.proxies.speak_for(request) and request.headers.get("x-forwarded-proto") == "https"


def local_path(text: str | None) -> str:
    """Return ``/`` for other servers' paths, to prevent open redirects."""
    if not text or not text.startswith("/") or text.startswith(("//", "/\\")) or not text.isprintable():
        return "/"
    return text


async def read_fields(bodies: BodyReader, request: Request, most_bytes: int) -> list[tuple[str, str]]:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _FORM:
        raise HttpProblem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "The body must be a form.", closes=True)
    async with bodies.read(request, most_bytes) as raw:
        text = bytes(raw).decode("utf-8", "replace")
    try:
        return parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise HttpProblem(HTTPStatus.UNPROCESSABLE_ENTITY, f"A form has at most {_MOST_FIELDS} fields.") from None
