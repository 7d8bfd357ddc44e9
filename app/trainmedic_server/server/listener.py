"""Serves the application by uvicorn, with bounds on slow and oversized clients, and a stop that does not hang.

Uvicorn's parser takes headers of any size at any pace; `_Protocol` and the cleanup of connections bound both.
Who calls it: wiring, and tests that need real connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from trainmedic_server import telemetry
from trainmedic_server.errors import ConfigurationError, Saturated
from trainmedic_server.server.event_feed import EventFeed
from trainmedic_server.server.limits import KIB
from trainmedic_server.server.problems import ProblemResponse, from_error
from trainmedic_server.server.standby import SwitchableApp

# Alertmanager and Prometheus send their headers at once, within one packet.
_HEADER_SECONDS = 10.0
_HEADER_BYTES = 64 * KIB
# Chunked encoding costs up to six bytes for each byte of a body.
_FRAMING_PER_BYTE = 8
# Connections that are served; some more are accepted only to answer 503. Together they stay below the
# 1,024 open files that a process may have by default.
_CONNECTIONS = 700
_CONNECTIONS_ANSWERED_503 = 100
_KEEP_ALIVE_SECONDS = 75  # longer than Alertmanager's and Prometheus' intervals in a busy group
_GRACE_SECONDS = 10
_FLUSH_SECONDS = 30.0  # for the client to take the last of a response
_CLEANUP_TICKS = 10  # of a tenth of a second

log = telemetry.logger(__name__)


async def serve(
    app: FastAPI | SwitchableApp,
    host: str,
    port: int,
    stop: asyncio.Event,
    on_started: Callable[[str, int], None] | None = None,
) -> None:
    """Serve `app` until `stop` is set, then let requests in work finish, for at most some seconds.

    Port 0 takes a free one; `on_started` is called with the address. The caller handles signals.
    Raises ConfigurationError where the address cannot be bound.
    """
    with _bound(host, port) as listening:
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        server = _Server(config, app.state.feed, stop)
        if on_started is not None:
            server.on_started = lambda: on_started(*listening.getsockname()[:2])
        await server.serve(sockets=[listening])


class _Server(uvicorn.Server):
    """Uvicorn's server, which stops when `stop` is set, and then first ends the event streams."""

    def __init__(self, config: uvicorn.Config, feed: EventFeed | SwitchableApp, stop: asyncio.Event) -> None:
        super().__init__(config)
        self.on_started: Callable[[], None] = lambda: None
        self._feed = feed
        self._stop = stop
        self._closing: dict[Any, float] = {}

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # without uvicorn's own handlers: the caller sets `stop`

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_started()

    async def on_tick(self, counter: int) -> bool:
        if counter % _CLEANUP_TICKS == 0:
            self._drop_stalled_connections()
        return await super().on_tick(counter) or self._stop.is_set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Before uvicorn waits for requests in work, of which an event stream is one that never ends by itself.
        await self._feed.close()
        await super().shutdown(sockets)

    def _drop_stalled_connections(self) -> None:
        """Drop connections whose headers do not arrive, or whose client does not read the end of a response."""
        now = asyncio.get_running_loop().time()
        closing: dict[Any, float] = {}
        for connection in list(self.server_state.connections):
            if not isinstance(connection, _Protocol):
                continue
            if connection.transport.is_closing():
                closing[connection] = self._closing.get(connection, now)
                if closing[connection] + _FLUSH_SECONDS < now:
                    connection.transport.abort()
            elif connection.waits_for_headers_since + _HEADER_SECONDS < now:
                connection.transport.abort()
        self._closing = closing


class _Protocol(HttpToolsProtocol):
    """One connection. ``waits_for_headers_since`` is the loop's time, or infinite while a request is in work."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.waits_for_headers_since = self.loop.time()
        self._received = 0
        self._body_received = 0
        super().connection_made(transport)
        if len(self.connections) > _CONNECTIONS + _CONNECTIONS_ANSWERED_503:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)
        if self._received > _HEADER_BYTES + _FRAMING_PER_BYTE * self._body_received:
            log.info("connection refused: oversized headers", client=self.client and self.client[0])
            self.send_400_response("Oversized headers.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.waits_for_headers_since = self.loop.time()
        self._received = self._body_received = 0

    def on_headers_complete(self) -> None:
        self.waits_for_headers_since = float("inf")
        crowded = len(self.connections) > _CONNECTIONS
        self.app = _answer_503 if crowded else self.config.loaded_app
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_received += len(body)
        super().on_body(body)


async def _answer_503(scope: Scope, receive: Receive, send: Send) -> None:
    problem = from_error(Saturated("connections"))
    problem.closes = True
    await ProblemResponse(problem)(scope, receive, send)


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror}") from error
