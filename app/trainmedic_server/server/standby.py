"""The API of a server that stands by while another one leads: it answers probes, and forwards the rest.

A request is forwarded unchanged, including its token, to the address that the leader advertises. If the
leader advertises none, or does not answer, the reply is 503, after which Alertmanager tries again. So a client may
ask any of the servers. Who calls it: wiring, which serves a
`SwitchableApp` and switches it to the real application when this server is elected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Protocol

import httpx
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainmedic_server import __version__, telemetry
from trainmedic_server.ports.outside import Clock
from trainmedic_server.server.problems import HttpProblem, ProblemResponse
from trainmedic_server.server.sites import SiteCheck
from trainmedic_server.server.status import Dependency, Health, Ready

RETRY_SECONDS = 1
# Marks a forwarded request, so that two servers that both stand by do not forward it in a circle.
_FORWARDED = b"trainmedic-handed-on"
# Headers that concern one connection (RFC 9110, section 7.6.1), and those that the client library sets itself. The
# Host stays, so that the leader can tell for which site the request was made.
_OF_ONE_HOP = {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"}
# Whom a proxy vouches for is believed by the proxy's address, and the leader sees only this server's.
_NOT_HANDED_ON = _OF_ONE_HOP | {b"x-forwarded-user", b"x-forwarded-groups"}
# Event streams send something every 15 s; a delivery is answered long before 60 s.
_TIMEOUT = httpx.Timeout(60.0, connect=2.0, pool=5.0)
_CONNECTIONS = 300
# For what is malformed. Which names are its own, the leader knows.
_SITES = SiteCheck(is_open=lambda: False)

log = telemetry.logger(__name__)


class ElectionStatus(Protocol):
    """The state of the leader election, as ``adapters.sql_store.election`` knows it."""

    @property
    def why(self) -> str:
        """What this server waits for."""
        ...

    @property
    def holder(self) -> str:
        """The address of the leader; empty if unknown."""
        ...


class SwitchableApp:
    """The application that the listener serves: first the standby's, later the real one, without losing a request."""

    def __init__(self, standby: Standby) -> None:
        self._standby = standby
        self._app: ASGIApp = standby
        self._feed: Any = None
        self.state = SimpleNamespace(feed=self)

    def switch_to(self, app: Any) -> None:
        """Serve `app` from now on, and end its streams too when the listener stops."""
        self._app, self._feed = app, app.state.feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def close(self) -> None:
        """End every stream. The listener calls it as it would call an `EventFeed`'s."""
        self._standby.end_forwarding()
        if self._feed is not None:
            await self._feed.close()


class Standby:
    """The API of a server that stands by. Its owner calls `close` at the end."""

    def __init__(self, election: ElectionStatus, clock: Clock, metrics: telemetry.Metrics) -> None:
        self._election = election
        self._clock = clock
        self._metrics = metrics
        self._client = httpx.AsyncClient(
            timeout=_TIMEOUT, trust_env=False, limits=httpx.Limits(max_connections=_CONNECTIONS)
        )
        self._forwarding: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            _SITES.check(scope)
        except HttpProblem as problem:
            await ProblemResponse(problem, scope["path"])(scope, receive, send)
            return
        response: Response | None = None
        if scope["method"] in ("GET", "HEAD"):
            match scope["path"]:
                case "/health":
                    response = _json(Health(timestamp=self._clock.now(), version=__version__))
                case "/ready" if b"any=true" not in scope["query_string"]:
                    response = _json(self._ready(), HTTPStatus.SERVICE_UNAVAILABLE)
                case "/metrics":
                    response = Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)
        if response is not None:
            await response(scope, receive, send)
            return
        leader_address = self._election.holder
        if not leader_address or any(name == _FORWARDED for name, _ in scope["headers"]):
            await self._refuse(f"This server stands by: {self._election.why}.", scope, receive, send)
            return
        # A task of its own, so that `end_forwarding` can end it without cancelling the listener's.
        task = asyncio.create_task(self._forward(leader_address, scope, receive, send))
        self._forwarding.add(task)
        task.add_done_callback(self._forwarding.discard)
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    def end_forwarding(self) -> None:
        for task in self._forwarding:
            task.cancel()

    async def close(self) -> None:
        await self._client.aclose()

    def _ready(self) -> Ready:
        unused = Dependency(ok=False, detail="not used while this server stands by")
        standing_by = Dependency(ok=False, detail=f"stands by: {self._election.why}")
        return Ready(
            ready=False,
            store=standing_by,
            redis=unused,
            playbooks=unused,
            log_rules=unused,
            paused=False,
            breaker_open=False,
        )

    async def _refuse(self, reason: str, scope: Scope, receive: Receive, send: Send) -> None:
        # It closes the connection, so that the next try may reach another server.
        problem = HttpProblem(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"{reason} Try again.",
            headers={"Retry-After": str(RETRY_SECONDS)},
            closes=True,
        )
        await ProblemResponse(problem, scope["path"])(scope, receive, send)

    async def _forward(self, leader_address: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the request to `leader_address` and its response to the client, until that ends or the client leaves."""
        body_read = asyncio.Event()
        target = httpx.URL(scheme="http", netloc=leader_address.encode(), raw_path=_raw_path(scope))
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in _NOT_HANDED_ON]
        request = self._client.build_request(
            scope["method"], target, headers=[*headers, (_FORWARDED, b"1")], content=_body(receive, body_read)
        )
        disconnected = asyncio.create_task(_disconnected(receive, body_read))
        exchange = asyncio.create_task(self._exchange(request, scope, receive, send))
        try:
            await asyncio.wait([disconnected, exchange], return_when=asyncio.FIRST_COMPLETED)
            if exchange.done():
                exchange.result()
        finally:
            disconnected.cancel()
            exchange.cancel()
            await asyncio.wait([disconnected, exchange])

    async def _exchange(self, request: httpx.Request, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._client.send(request, stream=True)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            log.warning(
                "the leader does not answer a forwarded request", holder=str(request.url.host), error=repr(error)
            )
            await self._refuse("This server stands by, and the one that works does not answer.", scope, receive, send)
            return
        try:
            headers = [(name, value) for name, value in response.headers.raw if name.lower() not in _OF_ONE_HOP]
            await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            async for part in response.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except httpx.TransportError as error:
            # The status has been sent already. The response stays unfinished, by which the client sees the failure.
            log.warning("the server that works has ended in the middle of an answer", error=repr(error))
        finally:
            await response.aclose()


def _json(model: BaseModel, status: int = HTTPStatus.OK) -> Response:
    return Response(model.model_dump_json(), status, media_type="application/json")


def _raw_path(scope: Scope) -> bytes:
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return path.partition(b"?")[0] + (b"?" + query if query else b"")


async def _body(receive: Receive, body_read: asyncio.Event) -> AsyncIterator[bytes]:
    """The body as it arrives; `body_read` is set at its end, also where the forwarding ends before."""
    try:
        while True:
            message: Message = await receive()
            if message["type"] == "http.disconnect":
                raise httpx.ReadError("the client has left")
            yield message.get("body", b"")
            if not message.get("more_body", False):
                return
    finally:
        body_read.set()


async def _disconnected(receive: Receive, body_read: asyncio.Event) -> None:
    """Return once the client has left. Until the body has been read, `receive` is `_body`'s alone."""
    await body_read.wait()
    while (await receive())["type"] != "http.disconnect":
        pass
