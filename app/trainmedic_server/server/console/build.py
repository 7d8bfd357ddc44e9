"""Puts the console together in front of an API. Who calls it: the factory."""

from __future__ import annotations

import re
from dataclasses import replace
from http import HTTPStatus
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp

from trainmedic_server import telemetry
from trainmedic_server.ports.outside import Clock
from trainmedic_server.server.auth import Authenticator
from trainmedic_server.server.body import BodyReader
from trainmedic_server.server.console import alert_pages
from trainmedic_server.server.console.app import ConsoleApp, Parts
from trainmedic_server.server.console.assets import Assets
from trainmedic_server.server.console.forms import Forms
from trainmedic_server.server.console.fragments import Fragments
from trainmedic_server.server.console.inner_api import InnerApi
from trainmedic_server.server.console.live import MOST_TOPICS, LiveBoard
from trainmedic_server.server.console.page_request import last_event
from trainmedic_server.server.console.rendering import Renderer
from trainmedic_server.server.console.routes import OPEN_ROUTES, ROUTES
from trainmedic_server.server.console.sign_in import SignIn, read_form
from trainmedic_server.server.console.standing import ServerStanding
from trainmedic_server.server.event_feed import EventFeed
from trainmedic_server.server.events import EVENT_STREAM
from trainmedic_server.server.limits import MIB, ServerLimits
from trainmedic_server.server.problems import HttpProblem
from trainmedic_server.server.sites import refuse_other_sites
from trainmedic_server.server.streaming import StreamedResponse, while_allowed
from trainmedic_server.server.tokens import TokenRole

_PASTED_BYTES = MIB
"""Of an alert that is pasted into the page Why; a webhook's body may be large."""
_LONGEST_LINK = 4000
"""Up to here what was pasted goes into the address, which can be sent to others; what is longer is answered at once."""
_TOPIC = re.compile(r"head|runs|now|run:[0-9A-Za-z_-]{1,64}")


def console(
    api: ASGIApp,
    feed: EventFeed,
    auth: Authenticator,
    bodies: BodyReader,
    clock: Clock,
    limits: ServerLimits,
    metrics: telemetry.Metrics,
) -> ConsoleApp:
    """The console of `api`."""
    inner, assets = InnerApi(api), Assets()
    renderer = Renderer(clock, assets)

    async def last_seq() -> int:
        return await feed.start_of(None)

    standing = ServerStanding(inner, last_seq)
    board = LiveBoard(feed, Fragments(inner, renderer, standing).render, limits, metrics)
    forms = Forms(auth, inner, bodies)

    async def live(request: Request) -> Response:
        auth.require(request, TokenRole.VIEWER)
        topics, after = _asked(request)
        await board.join(topics)
        return StreamedResponse(
            while_allowed(board.lines(after, topics), lambda: auth.allows(request, TokenRole.VIEWER)),
            EVENT_STREAM,
            limits.stall_seconds,
            on_close=lambda: board.leave(topics),
        )

    async def explain(request: Request) -> Response:
        refuse_other_sites(request)
        asked = pages.page_request(request, {})
        fields = {name: value for name, value in (await read_form(bodies, request, _PASTED_BYTES)).items() if value}
        if len(address := f"/explain?{urlencode(fields)}") <= _LONGEST_LINK:
            return RedirectResponse(address, HTTPStatus.SEE_OTHER)
        return await alert_pages.explain(replace(asked, query=fields))

    raw = {("GET", "/console/live"): live, ("GET", "/login"): _nobody_signs_in, ("POST", "/console/explain"): explain}
    if auth.sessions is not None:
        sign_in = SignIn(auth, auth.sessions, renderer, bodies)
        raw |= {("GET", "/login"): sign_in.show, ("HEAD", "/login"): sign_in.show}
        raw |= {("POST", "/login"): sign_in.begin, ("POST", "/logout"): sign_in.end}
    pages = ConsoleApp(Parts(inner, auth, renderer, assets, standing), (*ROUTES, *OPEN_ROUTES), raw, forms.take)
    return pages


async def _nobody_signs_in(_: Request) -> Response:
    return RedirectResponse("/", HTTPStatus.SEE_OTHER)


def _asked(request: Request) -> tuple[frozenset[str], int]:
    """The topics that a page listens to, and the last event that it has. Raises HttpProblem."""
    topics = frozenset(request.query_params.get("topics", "").split(",")) - {""} | {"head"}
    named = request.headers.get("last-event-id") or request.query_params.get("after", "0")
    if len(topics) > MOST_TOPICS or not all(_TOPIC.fullmatch(topic) for topic in topics):
        raise HttpProblem(HTTPStatus.UNPROCESSABLE_ENTITY, "topics: head, runs, now, run:<id>, with commas between.")
    if (after := last_event(named)) is None:
        raise HttpProblem(HTTPStatus.UNPROCESSABLE_ENTITY, "after: must be the number of an event.")
    return topics, after
