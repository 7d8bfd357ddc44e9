"""What a server answers while another one works: that it lives and waits, and the rest through that one.

A request is handed on as it came, its token with it, to where the server that works says it can be
reached; where it does not say, or does not answer, the reply is 503, which Alertmanager repeats.
So it does not matter which of several servers is asked. Who calls it: wiring, which serves a
`SwitchableApp` and puts the real application in its place when this server's turn comes.
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
from trainmedic_server.server.status import Dependency, Health, Ready

RETRY_SECONDS = 1
_HANDED_ON = b"trainmedic-handed-on"
_NOT_HANDED_ON = {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"host", b"expect"}
# Event streams send something every 15 s; a delivery is answered long before.
_TIMEOUT = httpx.Timeout(60.0, connect=2.0, pool=5.0)
_CONNECTIONS = 300

log = telemetry.logger(__name__)


class ElectionStatus(Protocol):
    """What a server that stands by waits for, and where the one is that works; empty where unknown."""

    @property
    def why(self) -> str: ...
    @property
    def holder(self) -> str: ...


class SwitchableApp:
    """What the listener serves: one application, and later another, without a request lost in between."""

    def __init__(self, standby: Standby) -> None:
        self._standby = standby
        self._app: ASGIApp = standby
        self._feed: Any = None
        self.state = SimpleNamespace(feed=self)

    def switch_to(self, app: Any) -> None:
        """Serve `app` from now on; its streams end when the listener stops."""
        self._app, self._feed = app, app.state.feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def close(self) -> None:
        """Let every stream end."""
        self._standby.end_streams()
        if self._feed is not None:
            await self._feed.close()


class Standby:
    """The API of a server that stands by. `close` it after."""

    def __init__(self, turn: ElectionStatus, clock: Clock, metrics: telemetry.Metrics) -> None:
        self._turn = turn
        self._clock = clock
        self._metrics = metrics
        self._client = httpx.AsyncClient(
            timeout=_TIMEOUT, trust_env=False, limits=httpx.Limits(max_connections=_CONNECTIONS)
        )
        self._under_way: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
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
        holder = self._turn.holder
        if not holder or any(name == _HANDED_ON for name, _ in scope["headers"]):
            await self._refuse(f"This server stands by: {self._turn.why}.", scope, receive, send)
            return
        task = asyncio.create_task(self._hand_on(holder, scope, receive, send))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    def end_streams(self) -> None:
        for task in self._under_way:
            task.cancel()

    async def close(self) -> None:
        await self._client.aclose()

    def _ready(self) -> Ready:
        unused = Dependency(ok=False, detail="not used while this server stands by")
        waits = Dependency(ok=False, detail=f"stands by: {self._turn.why}")
        return Ready(ready=False, store=waits, redis=unused, playbooks=unused, paused=False, breaker_open=False)

    async def _refuse(self, why: str, scope: Scope, receive: Receive, send: Send) -> None:
        # It closes, so that the next try may reach another server.
        problem = HttpProblem(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"{why} Try again.",
            headers={"Retry-After": str(RETRY_SECONDS)},
            closes=True,
        )
        await ProblemResponse(problem, scope["path"])(scope, receive, send)

    async def _hand_on(self, holder: str, scope: Scope, receive: Receive, send: Send) -> None:
        read = asyncio.Event()
        target = httpx.URL(scheme="http", netloc=holder.encode(), raw_path=_raw_path(scope))
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in _NOT_HANDED_ON]
        request = self._client.build_request(
            scope["method"], target, headers=[*headers, (_HANDED_ON, b"1")], content=_body(receive, read)
        )
        leaving = asyncio.create_task(_left(receive, read))
        answering = asyncio.create_task(self._answer(request, scope, receive, send))
        try:
            await asyncio.wait([leaving, answering], return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            leaving.cancel()
            answering.cancel()
            await asyncio.wait([leaving, answering])

    async def _answer(self, request: httpx.Request, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._client.send(request, stream=True)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            log.warning("the server that works does not answer", holder=str(request.url.host), error=repr(error))
            await self._refuse("This server stands by, and the one that works does not answer.", scope, receive, send)
            return
        try:
            kept = [(name, value) for name, value in response.headers.raw if name.lower() not in _NOT_HANDED_ON]
            await send({"type": "http.response.start", "status": response.status_code, "headers": kept})
            async for part in response.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except httpx.TransportError as error:  # what was sent cannot be taken back; the connection ends unfinished
            log.warning("the server that works has ended in the middle of an answer", error=repr(error))
        finally:
            await response.aclose()


def _json(model: BaseModel, status: int = HTTPStatus.OK) -> Response:
    return Response(model.model_dump_json(), status, media_type="application/json")


def _raw_path(scope: Scope) -> bytes:
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return path.partition(b"?")[0] + (b"?" + query if query else b"")


async def _body(receive: Receive, read: asyncio.Event) -> AsyncIterator[bytes]:
    try:
        while True:
            message: Message = await receive()
            if message["type"] == "http.disconnect":
                raise httpx.ReadError("the client has left")
            yield message.get("body", b"")
            if not message.get("more_body", False):
                return
    finally:
        read.set()


async def _left(receive: Receive, read: asyncio.Event) -> None:
    """Return once the client has gone, which is only asked about when its request has been read."""
    await read.wait()
    while (await receive())["type"] != "http.disconnect":
        pass
