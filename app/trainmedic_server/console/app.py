"""The console as an ASGI application in front of the API.

A GET whose ``Accept`` prefers ``text/html`` gets the page, under the API's path. Changes are POSTs below ``/console/``,
which call the API.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlsplit

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from trainmedic_server import errors
from trainmedic_server.api.exports import CSV, NDJSON
from trainmedic_server.auth.auth import Authenticator, Principal
from trainmedic_server.auth.tokens import TokenRole
from trainmedic_server.console.assets import PREFIX as STATIC
from trainmedic_server.console.assets import Assets
from trainmedic_server.console.inner_api import InnerApi
from trainmedic_server.console.page_request import PageRequest, accepts_gzip
from trainmedic_server.console.rendering import SECURITY_HEADERS, Renderer, page
from trainmedic_server.console.sign_in import local_path
from trainmedic_server.console.standing import ServerStanding
from trainmedic_server.http import problems
from trainmedic_server.http.base_path import BasePath
from trainmedic_server.http.negotiation import preferred
from trainmedic_server.http.problems import HttpProblem

HTML = "text/html"
JSON = "application/json"
Handler = Callable[[PageRequest], Awaitable[Response]]
_ROOT_COOKIE_PATH = re.compile(rb"; Path=/(?=;|$)")
_MEDIA_TYPES = {".json": JSON, ".csv": CSV, ".ndjson": NDJSON}
# Pages whose API path has another name.
_API_PATHS = (
    (re.compile(r"/"), "/now"),
    (re.compile(r"/runs"), "/history"),
    (re.compile(r"/runs/(?P<run>[^/]+)"), "/history/{run}"),
    (re.compile(r"/nodes"), "/agents"),
    (re.compile(r"/settings"), "/ready"),
)


class Route(Struct, frozen=True):
    pattern: re.Pattern[str]
    handler: Handler
    always: bool = False
    """True if the API has nothing there: every client gets the page."""
    role: TokenRole | None = TokenRole.VIEWER  # required; None: everyone may see the page
    gives_way: bool = False
    """True if paths of the API that match `pattern` take precedence, for browsers too."""


class Parts(Struct, frozen=True):
    api: InnerApi
    api_answers: Callable[[Scope], bool]  # whether the API has a route for the request
    auth: Authenticator
    base: BasePath
    renderer: Renderer
    assets: Assets
    standing: ServerStanding

    def page_request(
        self, request: Request, parameters: Mapping[str, str], role: TokenRole | None = TokenRole.VIEWER
    ) -> PageRequest:
        principal = self.auth.require(request, role) if role is not None else Principal("", frozenset())
        sessions = self.auth.sessions
        signed_in = sessions is not None and sessions.of(request.headers.get("cookie")) is not None
        api, query = self.api.acting_as(principal), dict(request.query_params)
        return PageRequest(request, principal, parameters, api, self.renderer, self.standing, signed_in, query)


class ConsoleApp:
    """`raw` has handlers that need no page, by method and path. `takes_post` handles the forms."""

    def __init__(
        self,
        parts: Parts,
        routes: tuple[Route, ...],
        raw: Mapping[tuple[str, str], Callable[[Request], Awaitable[Response]]],
        takes_post: Callable[[Request], Awaitable[Response]],
    ) -> None:
        self._parts = parts
        self._routes = routes
        self._raw = raw
        self._takes_post = takes_post

    def takes(self, scope: Scope) -> bool:
        """Return whether the request is for the console. Otherwise set the API's path, and `Accept` by its ending."""
        method, path = scope["method"], scope["path"]
        if (method, path) in self._raw or path.startswith(("/console/", STATIC)):
            return True
        if method not in ("GET", "HEAD"):
            return False
        if any(route.always and route.pattern.fullmatch(path) for route in self._routes):
            return True
        is_page = _prefers_html(scope) and not path.endswith(tuple(_MEDIA_TYPES))
        if is_page and any(not route.gives_way and route.pattern.fullmatch(path) for route in self._routes):
            return True
        _use_api_path(scope)
        return is_page and not self._parts.api_answers(scope)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except errors.TrainmedicError as error:
            response = await self._problem(request, problems.from_error(error))
        for name, value in SECURITY_HEADERS.items():
            response.headers.setdefault(name, value)
        _put_below_base(self._parts.base, response)
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path, method = request.scope["path"], request.method
        raw = self._raw.get((method, path))
        if raw is not None:
            return await raw(request)
        if path.startswith(STATIC) and method in ("GET", "HEAD"):
            asset = self._parts.assets.response(path, accepts_gzip(request))
            if asset is None:
                raise HttpProblem(HTTPStatus.NOT_FOUND, "There is no such file.")
            return asset
        if method == "POST":
            return await self._takes_post(request)
        for route in self._routes:
            match = route.pattern.fullmatch(path)
            if match is not None:
                return await route.handler(self._parts.page_request(request, match.groupdict(), route.role))
        raise HttpProblem(HTTPStatus.NOT_FOUND, "There is no such page.")

    async def _problem(self, request: Request, problem: HttpProblem) -> Response:
        is_page = request.method in ("GET", "HEAD") and not request.url.path.startswith("/console/")
        if problem.status == HTTPStatus.UNAUTHORIZED and is_page:
            path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            sign_in = f"/login?next={quote(path, safe='')}"
            if request.headers.get("hx-request"):  # a part of a page: the whole page has to be requested
                return Response(status_code=HTTPStatus.UNAUTHORIZED, headers={"HX-Redirect": sign_in})
            return RedirectResponse(sign_in, HTTPStatus.SEE_OTHER)
        acted = request.method == "POST"
        named: dict[str, Any] = {"title": HTTPStatus(problem.status).phrase, "problem": problem, "acted": acted}
        named["back"] = self._parts.base.within(_came_from(request)) if acted else request.url.path
        if acted and problem.status == HTTPStatus.UNAUTHORIZED:
            named["title"], named["sign_in"] = "Signed out", f"/login?next={quote(named['back'], safe='')}"
        headers = {name: value for name, value in problem.headers.items() if name.lower() != "www-authenticate"}
        try:
            page_request = self._parts.page_request(request, {})
            response = await page_request.page("problem.html", status=problem.status, **named)
        except errors.TrainmedicError:  # the user may see no page, so this one has no data of the server
            text = self._parts.renderer.text("problem_alone.html", **named)
            return page(text, problem.status, accepts_gzip=accepts_gzip(request), headers=headers)
        response.headers.update(headers)
        return response


def _put_below_base(base: BasePath, response: Response) -> None:
    if not base.link:
        return
    for name in ("location", "hx-redirect"):
        if name in response.headers:
            response.headers[name] = base.over(base.within(response.headers[name]))
    path = f"; Path={base.link}".encode("latin-1")
    # Browsers require the path / for a ``__Host-`` cookie.
    response.raw_headers[:] = [
        (
            name,
            _ROOT_COOKIE_PATH.sub(path, value) if name == b"set-cookie" and not value.startswith(b"__Host-") else value,
        )
        for name, value in response.raw_headers
    ]


def _header(scope: Scope, wanted: bytes) -> str:
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), "")


def _came_from(request: Request) -> str:
    try:
        parts = urlsplit(request.headers.get("referer", ""))
    except ValueError:
        return "/"
    is_ours = parts.netloc == request.headers.get("host")
    return local_path(f"{parts.path}?{parts.query}" if parts.query else parts.path) if is_ours else "/"


def _prefers_html(scope: Scope) -> bool:
    return bool(_header(scope, b"hx-request")) or preferred(_header(scope, b"accept"), (JSON, HTML)) == HTML


def _use_api_path(scope: Scope) -> None:
    path: str = scope["path"]
    for ending, media_type in _MEDIA_TYPES.items():
        if path.endswith(ending) and path != "/openapi.json":
            path = path.removesuffix(ending) or "/"
            others = [(name, value) for name, value in scope["headers"] if name != b"accept"]
            scope["headers"] = [*others, (b"accept", media_type.encode())]
            break
    for pattern, api_path in _API_PATHS:
        match = pattern.fullmatch(path)
        if match is not None:
            path = api_path.format(**match.groupdict())
            break
    if path != scope["path"]:
        scope["path"] = path
        scope["raw_path"] = quote(path).encode()
