"""Uvicorn with limits on clients, and a stop that does not hang."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable, Generator
from functools import partial

import uvicorn
from fastapi import FastAPI

from trainmedic_server import telemetry
from trainmedic_server.errors import ConfigurationError
from trainmedic_server.http.connection_table import ConnectionTable
from trainmedic_server.http.http_connection import HttpConnection
from trainmedic_server.http.limits import ConnectionLimits
from trainmedic_server.http.standby import SwitchableApp
from trainmedic_server.live.event_feed import EventFeed

_GRACE_SECONDS = 10  # for active requests at the stop
_CLEANUP_TICKS = 10  # ticks of 0.1 s

log = telemetry.logger(__name__)


async def serve(
    app: FastAPI | SwitchableApp,
    host: str,
    port: int,
    stop: asyncio.Event,
    on_started: Callable[[str, int], None] | None = None,
    limits: ConnectionLimits = ConnectionLimits(),
) -> None:
    """Serve `app` until `stop` is set, then let active requests finish for 10 s.

    Port 0 selects a free one. Raises ConfigurationError if the address cannot be bound.
    """
    table = ConnectionTable(limits)
    with _bound(host, port, limits) as listening:
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=partial(HttpConnection, table=table, limits=limits),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=limits.keep_alive_seconds,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        server = _Server(config, app.state.feed, stop, table)
        if on_started is not None:
            server.on_started = lambda: on_started(*listening.getsockname()[:2])
        await server.serve(sockets=[listening])


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, feed: EventFeed | SwitchableApp, stop: asyncio.Event, table: ConnectionTable
    ) -> None:
        super().__init__(config)
        self.on_started: Callable[[], None] = lambda: None
        self._feed = feed
        self._stop = stop
        self._table = table

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # without uvicorn's handlers: the caller sets `stop`

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_started()

    async def on_tick(self, counter: int) -> bool:
        if counter % _CLEANUP_TICKS == 0:
            self._end_overdue_connections()
        return await super().on_tick(counter) or self._stop.is_set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Close the feed first: uvicorn waits for active requests, and an event stream never ends by itself.
        await self._feed.close()
        await super().shutdown(sockets)

    def _end_overdue_connections(self) -> None:
        now = asyncio.get_running_loop().time()
        for connection in list(self.server_state.connections):
            if isinstance(connection, HttpConnection) and connection.is_overdue(now):
                connection.transport.abort()
        if self._table.closed:
            log.warning("connections closed for capacity", closed=self._table.closed, open=len(self._table))
            self._table.closed = 0


def _bound(host: str, port: int, limits: ConnectionLimits) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.create_server(address[:2], family=family, backlog=2048)
    except UnicodeError as error:  # an empty part, or one of more than 63 characters
        raise ConfigurationError(f"cannot listen on {host}:{port}: the host is no name or address") from error
    except OSError as error:
        # Python appends the address to the text of the error number.
        reason = os.strerror(error.errno) if error.errno and not isinstance(error, socket.gaierror) else error.strerror
        remedy = "; stop what listens there, or set another --port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigurationError(f"cannot listen on {host}:{port}: {reason}{remedy}") from error
    # Accepted connections inherit these.
    for direction in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        listening.setsockopt(socket.SOL_SOCKET, direction, limits.socket_bytes)
    return listening
