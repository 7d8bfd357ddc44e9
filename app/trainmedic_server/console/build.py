from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Scope

from trainmedic_server import telemetry
from trainmedic_server.auth.auth import ANONYMOUS
from trainmedic_server.auth.tokens import TokenRole
from trainmedic_server.console import (
    alert_pages,
    api_page,
    log_page,
    place_pages,
    playbook_pages,
    run_pages,
    server_pages,
)
from trainmedic_server.console.app import ConsoleApp, Handler, Parts, Route
from trainmedic_server.console.assets import Assets
from trainmedic_server.console.forms import Forms
from trainmedic_server.console.fragments import Fragments
from trainmedic_server.console.gpu_indexes import GpuIndexes
from trainmedic_server.console.inner_api import InnerApi
from trainmedic_server.console.live import MOST_TOPICS, LiveBoard
from trainmedic_server.console.log_follower import LogFollower
from trainmedic_server.console.page_request import last_event
from trainmedic_server.console.rendering import Renderer
from trainmedic_server.console.sign_in import SignIn
from trainmedic_server.console.standing import ServerStanding
from trainmedic_server.engine.shared_presences import SharedPresences
from trainmedic_server.http.api_routes import RouteParts
from trainmedic_server.http.base_path import BasePath
from trainmedic_server.http.problems import HttpProblem
from trainmedic_server.http.streaming import StreamedResponse, while_allowed
from trainmedic_server.live.event_feed import EventFeed
from trainmedic_server.live.events import EVENT_STREAM

_TOPIC = re.compile(r"head|runs|now|run:[0-9A-Za-z_-]{1,64}")


def _route(pattern: str, handler: Handler, *, always: bool = False, gives_way: bool = False) -> Route:
    return Route(re.compile(pattern), handler, always, gives_way=gives_way)


ROUTES = (
    _route(r"/", server_pages.now),
    _route(r"/runs", run_pages.runs),
    _route(r"/runs/(?P<run>[0-9A-Za-z_-]{1,64})", run_pages.run),
    _route(r"/approvals", alert_pages.approvals),
    _route(r"/alerts", alert_pages.alerts),
    _route(r"/explain", alert_pages.explain, always=True),
    _route(r"/why", alert_pages.why, always=True),
    _route(r"/playbooks", playbook_pages.playbooks),
    _route(r"/playbooks/(?P<playbook>[^/]{1,200})", playbook_pages.playbook),
    _route(r"/jobs", place_pages.jobs),
    _route(r"/logs", log_page.opened, always=True),
    _route(r"/jobs/(?P<job>.{1,253})/logs", log_page.log),
    # Names of jobs and nodes may have slashes, which arrive unencoded however a link wrote them.
    _route(r"/jobs/(?P<job>.{1,253})", place_pages.job, gives_way=True),
    _route(r"/nodes", place_pages.nodes),
    _route(r"/nodes/(?P<node>.{1,253})", place_pages.node),
    _route(r"/audit", server_pages.audit),
    _route(r"/settings", server_pages.settings),
    _route(r"/report", server_pages.report),
    _route(r"/r/(?P<run>[0-9A-Za-z_-]{1,64})", run_pages.short_link, always=True),
    Route(re.compile(r"/docs"), api_page.reference, always=True, role=None),
)


def console(
    api: ASGIApp,
    api_answers: Callable[[Scope], bool],
    feed: EventFeed,
    shared: RouteParts,
    base: BasePath,
    metrics: telemetry.Metrics,
    presences: SharedPresences,
) -> ConsoleApp:
    auth, bodies, limits = shared.auth, shared.bodies, shared.limits
    inner, assets, gpus = InnerApi(api, ANONYMOUS), Assets(), GpuIndexes(presences)
    renderer = Renderer(shared.clock, assets, base, index_of=gpus.of)

    async def last_seq() -> int:
        return await feed.start_of(None)  # of the newest event

    standing = ServerStanding(inner, last_seq, gpus)
    board = LiveBoard(feed, Fragments(inner, renderer, standing).render, limits, metrics)
    parts = Parts(inner, api_answers, auth, base, renderer, assets, standing)

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

    raw: dict[tuple[str, str], Callable[[Request], Awaitable[Response]]] = {
        ("GET", "/console/live"): live,
        ("GET", "/console/log"): LogFollower(parts, limits).take,
        ("GET", "/login"): _login_without_tokens,
    }
    if auth.sessions is not None:
        sign_in = SignIn(auth, auth.sessions, renderer, bodies)
        raw |= {("GET", "/login"): sign_in.show, ("HEAD", "/login"): sign_in.show}
        raw |= {("POST", "/login"): sign_in.begin, ("POST", "/logout"): sign_in.end}
    return ConsoleApp(parts, ROUTES, raw, Forms(parts, bodies).take)


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
