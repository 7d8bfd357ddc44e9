"""One HTTP connection: uvicorn's, with limits on heads, queued requests, and the time to take a response."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from trainmedic_server import telemetry
from trainmedic_server.errors import Saturated
from trainmedic_server.http.connection_table import ConnectionTable, Standing
from trainmedic_server.http.limits import ConnectionLimits
from trainmedic_server.http.problems import MEDIA_TYPE, ProblemResponse, from_error

# Received bytes per byte of a body: a chunk of one byte takes six. Bytes beyond that count as the head's.
_FRAMING_PER_BYTE = 8
_LINGER_SECONDS = 2.0  # for a refused client to read the answer and close
_NEVER = float("inf")

log = telemetry.logger(__name__)


class HttpConnection(HttpToolsProtocol):
    def __init__(self, *arguments: Any, table: ConnectionTable, limits: ConnectionLimits, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.address = ""
        self.standing = Standing.STRANGER
        self._table = table
        self._limits = limits
        # Newest request that is, or was, being answered. ``cycle`` is the newest that has arrived.
        self._serving: RequestResponseCycle | None = None
        self._refusal: _Refusal | None = None  # once set, nothing more is read
        self._received = 0  # bytes since the present request began: head, body and framing
        self._body_received = 0  # bytes of the present request's body
        self._outside_bodies = 0  # bytes of the present piece that are not part of a body
        # In the event loop's time.
        self._head_deadline = _NEVER
        self._write_deadline = _NEVER

    # Interface to the table.

    @property
    def in_work(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def has_arrived(self) -> bool:
        return self.in_work and self._has_arrived()

    @property
    def unread_bytes(self) -> int:
        waiting = sum(len(cycle.body) for cycle, _ in self.pipeline)
        return self.transport.get_write_buffer_size() + waiting + (len(self.cycle.body) if self.cycle else 0)

    def give_way(self) -> None:
        self.transport.abort()

    def is_overdue(self, now: float) -> bool:
        """Return whether the client sends or reads too slowly. Start the time limit of a closing connection."""
        if self.transport.is_closing() and self._write_deadline == _NEVER:
            self._write_deadline = now + self._limits.flush_seconds
        return now > min(self._head_deadline, self._write_deadline)

    # Callbacks of the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self)
        self.address = self.client[0] if self.client else ""
        self._head_deadline = self.loop.time() + self._limits.head_seconds
        self._table.add(self)
        if self._table.is_overfull:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._table.discard(self)
        if self._serving is not None and not self._serving.response_complete:
            # Uvicorn notifies only the newest request, which may be a waiting one.
            self._serving.disconnected = True
            self._serving.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._unset_keepalive_if_required()
        self._received += len(data)
        self._outside_bodies = len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Answer it as the plain request that it also is. What follows would be another protocol.
            self._end_after_responses()
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(
                cause if isinstance(cause, _Refusal) else _Refusal(HTTPStatus.BAD_REQUEST, "This is not HTTP.")
            )
        else:
            framing = self._received - _FRAMING_PER_BYTE * self._body_received
            if framing > self._limits.head_bytes or len(self.headers or ()) > self._limits.headers:
                self._refuse(_oversized(self._limits))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_deadline = self.loop.time() + self._limits.flush_seconds
        self._table.note_unread(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_deadline = _NEVER
        self._table.note_read(self)

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= self._limits.pipelined:
            raise _Refusal(
                HTTPStatus.BAD_REQUEST, f"More than {self._limits.pipelined} requests wait on this connection."
            )
        super().on_message_begin()
        self._head_deadline = self.loop.time() + self._limits.head_seconds
        self._body_received = 0
        self._received = self._outside_bodies  # an upper bound: it may include the end of the request before

    def on_headers_complete(self) -> None:
        if self._received > self._limits.head_bytes or len(self.headers) > self._limits.headers:
            self._check_head()
        self._head_deadline = _NEVER
        self.scope["state"]["vouch"] = self._vouch
        self.scope["state"]["has_arrived"] = self._has_arrived
        self.app = _answer_503 if self._table.is_crowded else self.config.loaded_app
        self._table.note_activity(self)
        super().on_headers_complete()
        self.cycle.transport = _JoinedWrites(self.transport)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._body_received += len(body)
        self._outside_bodies -= len(body)
        super().on_body(body)

    def on_response_complete(self) -> None:
        if self._serving is not None and isinstance(self._serving.transport, _JoinedWrites):
            self._serving.transport.flush()  # a response without a body, such as for HEAD
        super().on_response_complete()
        self._table.note_activity(self)
        if not self.in_work and self._head_deadline == _NEVER:
            self._head_deadline = self.loop.time() + self._limits.keep_alive_seconds

    def _check_head(self) -> None:
        """Refuse a complete head that is too large, without counting the body that arrived with it."""
        if len(self.url) > self._limits.head_bytes:
            raise _Refusal(HTTPStatus.REQUEST_URI_TOO_LONG, f"The URL is longer than {self._limits.head_bytes} bytes.")
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._limits.head_bytes or len(self.headers) > self._limits.headers:
            raise _oversized(self._limits)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._serving = cycle
        super()._start_asgi_task(cycle, app)

    def _has_arrived(self) -> bool:
        return self._serving is not None and not self._serving.more_body

    def _vouch(self, standing: Standing) -> None:
        self._table.vouch(self, standing)

    # Refusals.

    def send_400_response(self, msg: str) -> None:
        self._refuse(_Refusal(HTTPStatus.BAD_REQUEST, msg))

    def _refuse(self, refusal: _Refusal) -> None:
        """Answer with the refusal, unless earlier requests still await an answer."""
        self._refusal = refusal
        log.info("connection refused", client=self.address, status=refusal.status, detail=refusal.detail)
        cycle = self.cycle
        if self.in_work and (self.pipeline or not cycle.more_body or cycle.response_started):
            self._end_after_responses()
            return
        if self.in_work:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.write(refusal.response())
        # Closing while the client sends would reset the connection, and the client might miss the answer.
        self.transport.write_eof()
        self._head_deadline = self.loop.time() + _LINGER_SECONDS

    def _end_after_responses(self) -> None:
        self._refusal = self._refusal or _Refusal(HTTPStatus.BAD_REQUEST, "")  # never sent; stops reading
        self._head_deadline = _NEVER
        while self.pipeline and self.pipeline[0][0].more_body:  # the newest request is the first
            self.pipeline.popleft()  # incomplete, and not read further
        last = self.pipeline[0][0] if self.pipeline else self._serving
        if last is None or last.response_complete:
            self.transport.close()
        else:
            last.keep_alive = False


class _JoinedWrites:
    """Transport that sends a response's head and body in one system call if the length is known."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held = b""
        self._has_begun = False

    def write(self, data: bytes) -> None:
        if not self._has_begun and b"\r\ncontent-length: " in data:
            self._held = data
        elif self._held:
            self._held, data = b"", self._held + data
            self._transport.write(data)
        else:
            self._transport.write(data)
        self._has_begun = True

    def flush(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            self._transport.write(held)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class _Flow(FlowControl):
    """Flow control that keeps reading paused while requests wait."""

    def __init__(self, transport: asyncio.Transport, connection: HttpConnection) -> None:
        super().__init__(transport)
        self._connection = connection

    def resume_reading(self) -> None:
        if not self._connection.pipeline:
            super().resume_reading()


class _Refusal(Exception):
    """A client exceeded a limit, or sent no HTTP. The parser chains it if its callbacks raise it."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail

    def response(self) -> bytes:
        members = {"type": "about:blank", "title": self.status.phrase, "status": self.status, "detail": self.detail}
        body = json.dumps(members).encode()
        head = f"content-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        return STATUS_LINE[self.status] + head.encode() + body


def _oversized(limits: ConnectionLimits) -> _Refusal:
    return _Refusal(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        f"The request's head has more than {limits.head_bytes} bytes or {limits.headers} headers.",
    )


async def _answer_503(scope: Scope, receive: Receive, send: Send) -> None:
    problem = from_error(Saturated("connections"))
    problem.closes = True
    await ProblemResponse(problem)(scope, receive, send)
