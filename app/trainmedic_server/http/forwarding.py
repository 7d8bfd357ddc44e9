"""Forwarding of requests to the leader over pooled connections."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import AsyncExitStack
from typing import Any

import httptools
from starlette.types import Receive, Scope, Send

from trainmedic.errors import described

MARK = b"trainmedic-handed-on"  # header of a forwarded request, so that two standbys do not forward it in a circle
# Headers of one connection (RFC 9110, section 7.6.1). Host stays, because the leader checks it.
_OF_ONE_HOP = {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"}
# The leader trusts a proxy's user by the proxy's address, but sees only this server's.
_NOT_FORWARDED = _OF_ONE_HOP | {b"x-forwarded-user", b"x-forwarded-groups"}

_MOST_AT_ONCE = 300  # further requests wait, at most _TURN_SECONDS
_MOST_READS = 250  # of them: live pages last for hours, and must leave turns to deliveries of alerts
_TURN_SECONDS = 5.0
_CONNECT_SECONDS = 2.0
_SILENT_SECONDS = 60.0  # silence of the leader that aborts; event streams send something every 15 s
_SLOWEST_PART_SECONDS = 10.0  # longest silence of a sending client
_IDLE_SECONDS = 30.0  # idle time up to which a connection is reused; the leader closes it after 75 s (`limits`)
_MONITOR_AFTER_SECONDS = 1.0  # a short exchange is not monitored for disconnect and silence
_MOST_UNSENT = 1 << 18  # bytes of an answer that wait for the client before reading pauses


class CutOff(ConnectionError):
    """The leader ended an answer early."""


class ClientLeft(ConnectionError):
    """The client has disconnected."""


class ClientSilent(ConnectionError):
    """The client does not send the rest of its body."""


class NoTurn(ConnectionError):
    """Too many requests are being forwarded."""


class Forwarder:
    """Forwards requests. `end` aborts all exchanges; the forwarder stays usable."""

    def __init__(self) -> None:
        self._idle: list[_Connection] = []
        self._in_use: set[_Connection] = set()
        self._turns = asyncio.Semaphore(_MOST_AT_ONCE)
        self._read_turns = asyncio.Semaphore(_MOST_READS)

    async def forward(self, address: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the request to the leader at `address` ("host:port"), and its answer to the client.

        Raises OSError before anything was sent to the client, CutOff if the answer ends early, ClientLeft, ClientSilent
        or NoTurn.
        """
        async with AsyncExitStack() as turns:
            try:
                async with asyncio.timeout(_TURN_SECONDS):
                    if scope["method"] in ("GET", "HEAD"):
                        await turns.enter_async_context(self._read_turns)
                    await turns.enter_async_context(self._turns)
            except TimeoutError:
                raise NoTurn("too many other requests are being forwarded") from None
            connection = await self._connection(address)
            self._in_use.add(connection)
            try:
                await _exchange(connection, scope, receive, send)
            finally:
                self._in_use.discard(connection)
                if connection.is_reusable:
                    connection.idle_since = time.monotonic()
                    self._idle.append(connection)
                else:
                    connection.abort()

    def end(self) -> None:
        for connection in (*self._idle, *self._in_use):
            connection.abort()
        self._idle.clear()

    async def _connection(self, address: str) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            old = time.monotonic() - connection.idle_since > _IDLE_SECONDS
            if connection.address == address and connection.is_reusable and not old:
                return connection
            connection.abort()
        host, _, port = address.rpartition(":")
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, made = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(address), host.strip("[]"), int(port)
            )
        return made


async def _exchange(connection: _Connection, scope: Scope, receive: Receive, send: Send) -> None:
    await _send_request(connection, scope, receive)
    guard: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()

    def monitor() -> None:
        guard.append(loop.create_task(_abort_if_abandoned(connection, receive)))

    timer = loop.call_later(_MONITOR_AFTER_SECONDS, monitor)
    try:
        await connection.until(lambda: connection.status != 0)
        headers = [(name, value) for name, value in connection.headers if name.lower() not in _OF_ONE_HOP]
        await send({"type": "http.response.start", "status": connection.status, "headers": headers})
        try:
            while not connection.is_complete:
                await connection.until(lambda: bool(connection.body) or connection.is_complete)
                if not connection.is_complete:
                    await send({"type": "http.response.body", "body": connection.take(), "more_body": True})
            await send({"type": "http.response.body", "body": connection.take()})
        except ClientLeft:
            raise
        except ConnectionError as error:
            raise CutOff(described(error)) from error
    finally:
        timer.cancel()
        for task in guard:
            task.cancel()


async def _send_request(connection: _Connection, scope: Scope, receive: Receive) -> None:
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    lines = [scope["method"].encode() + b" " + path.partition(b"?")[0] + (b"?" + query if query else b"")]
    lines[0] += b" HTTP/1.1"
    names = {name.lower() for name, _ in scope["headers"]}
    lines += [name + b": " + value for name, value in scope["headers"] if name.lower() not in _NOT_FORWARDED]
    lines.append(MARK + b": 1")
    if b"host" not in names:
        lines.append(b"host: " + connection.address.encode())
    in_chunks = b"transfer-encoding" in names
    if in_chunks:
        lines.append(b"transfer-encoding: chunked")
    connection.begin(without_body=scope["method"] == "HEAD")
    waiting = b"\r\n".join(lines) + b"\r\n\r\n"
    more = True
    while more:
        try:
            async with asyncio.timeout(_SLOWEST_PART_SECONDS):
                message = await receive()
        except TimeoutError:
            raise ClientSilent(f"no part of the body arrived for {_SLOWEST_PART_SECONDS:g} s") from None
        if message["type"] == "http.disconnect":
            raise ClientLeft
        part, more = message.get("body", b""), message.get("more_body", False)
        if in_chunks and part:
            part = b"%x\r\n%b\r\n" % (len(part), part)
        if in_chunks and not more:
            part += b"0\r\n\r\n"
        if not await connection.write(waiting + part):
            return  # the leader has begun to answer without the rest of the body
        waiting = b""
    connection.is_sent = True


async def _abort_if_abandoned(connection: _Connection, receive: Receive) -> None:
    leaves = asyncio.ensure_future(_client_left(receive))
    try:
        while not leaves.done() and connection.silent_seconds < _SILENT_SECONDS:
            await asyncio.wait([leaves], timeout=_SILENT_SECONDS - connection.silent_seconds)
    finally:
        leaves.cancel()
    connection.has_client = not leaves.done()
    connection.abort()


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Connection(asyncio.Protocol):
    def __init__(self, address: str) -> None:
        self.address = address
        self.idle_since = 0.0
        self._transport: Any = None
        self._is_lost = False
        self._waiting: asyncio.Future[None] | None = None  # of `until`, for a change
        self._drained: asyncio.Future[None] | None = None  # None while the buffer has capacity
        self.begin(without_body=False)

    def begin(self, *, without_body: bool) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._without_body = without_body
        self._keeps_alive = True
        self._body_bytes = 0
        self._heard_at = time.monotonic()
        self.status = 0  # 0 before the answer begins
        self.headers: list[tuple[bytes, bytes]] = []
        self.body: deque[bytes] = deque()
        self.is_sent = self.is_complete = False
        self.has_client = True

    @property
    def is_reusable(self) -> bool:
        return self.is_sent and self.is_complete and self._keeps_alive and not self._is_lost

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self._heard_at

    async def write(self, part: bytes) -> bool:
        """Send a part of the request, once the buffer has capacity. Return False if the answer has begun."""
        if self._drained is not None:
            async with asyncio.timeout(_SILENT_SECONDS):
                await self._drained
        if self.status:
            return False
        self._raise_if_over()
        self._transport.write(part)
        return True

    async def until(self, condition: Any) -> None:
        while not condition():
            self._raise_if_over()
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting

    def take(self) -> bytes:
        taken = b"".join(self.body)
        self.body.clear()
        if self._body_bytes > _MOST_UNSENT:
            self._transport.resume_reading()
        self._body_bytes = 0
        return taken

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _raise_if_over(self) -> None:
        if not self.has_client:
            raise ClientLeft
        if self._is_lost:
            raise ConnectionError("the connection ended")

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    # Callbacks of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._heard_at = time.monotonic()
        if self.is_complete:  # data that was not requested
            self._keeps_alive = False
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._keeps_alive = False
            self.abort()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self.resume_writing()
        self._wake()

    def pause_writing(self) -> None:
        self._drained = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    # Callbacks of the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self._without_body:
            # The parser would wait for a body, of which only the length was sent.
            self._keeps_alive, self.is_complete = False, True

    def on_body(self, body: bytes) -> None:
        before = self._body_bytes
        self._body_bytes += len(body)
        self.body.append(body)
        if before <= _MOST_UNSENT < self._body_bytes:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self.is_complete = True
        self._keeps_alive = self._keeps_alive and self._parser.should_keep_alive()
