from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Scope

from trainmedic_server import telemetry
from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.auth.tokens import TokenRole
from trainmedic_server.console.app import ConsoleApp, Parts
from trainmedic_server.console.assets import Assets
from trainmedic_server.console.forms import Forms
from trainmedic_server.console.fragments import Fragments
from trainmedic_server.console.gpu_indexes import GpuIndexes
from trainmedic_server.console.inner_api import InnerApi
from trainmedic_server.console.live import MOST_TOPICS, LiveBoard
from trainmedic_server.console.log_follower import LogFollower
from trainmedic_server.console.page_forms import PageForms
from trainmedic_server.console.page_request import last_event
from trainmedic_server.console.rendering import Renderer
from trainmedic_server.console.routes import OPEN_ROUTES, ROUTES
from trainmedic_server.console.sign_in import SignIn
from trainmedic_server.console.standing import ServerStanding
from trainmedic_server.engine.shared_presences import SharedPresences
from trainmedic_server.http.base_path import BasePath
from trainmedic_server.http.body import BodyReader
from trainmedic_server.http.limits import ServerLimits
from trainmedic_server.http.problems import HttpProblem
from trainmedic_server.http.streaming import StreamedResponse, while_allowed
from trainmedic_server.live.event_feed import EventFeed
from trainmedic_server.live.events import EVENT_STREAM
from trainmedic_server.ports.outside import Clock

_TOPIC = re.compile(r"head|runs|now|run:[0-9A-Za-z_-]{1,64}")


def console(
    api: ASGIApp,
    api_answers: Callable[[Scope], bool],
    feed: EventFeed,
    auth: Authenticator,
    base: BasePath,
    bodies: BodyReader,
    clock: Clock,
    limits: ServerLimits,
    metrics: telemetry.Metrics,
    presences: SharedPresences,
) -> ConsoleApp:
    inner, assets, gpus = InnerApi(api), Assets(), GpuIndexes(presences)
    renderer = Renderer(clock, assets, base, index_of=gpus.of)

    async def last_seq() -> int:
        return await feed.start_of(None)  # of the newest event

    standing = ServerStanding(inner, last_seq, gpus)
    board = LiveBoard(feed, Fragments(inner, renderer, standing).render, limits, metrics)
    forms = Forms(auth, inner, bodies)
    page_forms = PageForms(auth, bodies, lambda request, parts: pages.page_request(request, parts))

    async def take(request: Request) -> Response:
        return await (page_forms if page_forms.takes(request.url.path) else forms).take(request)

    async def live(request: Request) -> Response:
        auth.require(request, TokenRole.VIEWER)
        topics, after = _topics_and_position(request)
        await board.join(topics)
        return StreamedResponse(
            while_allowed(board.lines(after, topics), lambda: auth.allows(request, TokenRole.VIEWER)),
            EVENT_STREAM,
            limits.stall_seconds,
            on_close=lambda: board.leave(topics),
        )

    follower = LogFollower(auth, limits, lambda request, parts: pages.page_request(request, parts))
    raw: dict[tuple[str, str], Callable[[Request], Awaitable[Response]]] = {
        ("GET", "/console/live"): live,
        ("GET", "/console/log"): follower.take,
        ("GET", "/login"): _login_without_tokens,
    }
    if auth.sessions is not None:
        sign_in = SignIn(auth, auth.sessions, renderer, bodies)
        raw |= {("GET", "/login"): sign_in.show, ("HEAD", "/login"): sign_in.show}
        raw |= {("POST", "/login"): sign_in.begin, ("POST", "/logout"): sign_in.end}
    pages = ConsoleApp(
        Parts(inner, api_answers, auth, base, renderer, assets, standing), (*ROUTES, *OPEN_ROUTES), raw, take
    )
    return pages


async def _login_without_tokens(_: Request) -> Response:
    return RedirectResponse("/", HTTPStatus.SEE_OTHER)


def _topics_and_position(request: Request) -> tuple[frozenset[str], int]:
    topics = frozenset(request.query_params.get("topics", "").split(",")) - {""} | {"head"}
    named = request.headers.get("last-event-id") or request.query_params.get("after", "0")
    if len(topics) > MOST_TOPICS or not all(_TOPIC.fullmatch(topic) for topic in topics):
        raise HttpProblem(
            HTTPStatus.UNPROCESSABLE_ENTITY, "topics: must be head, runs, now or run:<id>, separated by commas."
        )
    if (after := last_event(named)) is None:
        raise HttpProblem(HTTPStatus.UNPROCESSABLE_ENTITY, "after: must be the number of an event.")
    return topics, after
