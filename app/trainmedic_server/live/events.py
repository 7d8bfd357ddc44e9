"""``GET /events``: new history events as server-sent events (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import Header, Query, Request, Response

from trainmedic_server.api import examples, views
from trainmedic_server.auth.tokens import TokenRole
from trainmedic_server.domain.run import Event
from trainmedic_server.errors import StoreUnavailable
from trainmedic_server.http.api_routes import ApiRoutes, RouteParts
from trainmedic_server.http.limits import MIB
from trainmedic_server.http.streaming import StreamedResponse, while_allowed
from trainmedic_server.live.event_feed import EventFeed

EVENT_STREAM = "text/event-stream"
_LARGEST_SEQ = (1 << 63) - 1  # the maximum of SQLite's and PostgreSQL's integers
_RETRY_MILLISECONDS = 2000  # pause of clients before they reconnect
_KEPT_BYTES = 2 * MIB  # of cached lines

_EXAMPLE = f"id: {examples.EVENT['seq']}\nevent: {examples.EVENT['kind']}\ndata: {{…}}\n\n"


def router(feed: EventFeed, parts: RouteParts) -> ApiRoutes:
    routes = ApiRoutes("history", parts.auth)
    auth, limits = parts.auth, parts.limits
    written = EventLines()

    @routes.read(
        "/events",
        summary="Live events",
        response_class=Response,
        responses={
            200: {
                "description": "Server-sent events. `data` is an event as in `GET /history/{run_id}`.",
                "content": {EVENT_STREAM: {"schema": {"type": "string"}, "example": _EXAMPLE}},
            }
        },
    )
    async def events(
        request: Request,
        after: Annotated[
            int | None, Query(ge=0, le=_LARGEST_SEQ, description="Begin after this event; 0 for all.")
        ] = None,
        run_id: Annotated[
            str | None, Query(pattern=r"^[0-9A-Za-z_-]{1,64}$", description="Only the events of this run.")
        ] = None,
        last_event_id: Annotated[int | None, Header(ge=0, le=_LARGEST_SEQ, description="Overrides `after`.")] = None,
    ) -> Response:
        """Every event after the one that the client names, then each new one, until either side closes.

        Without `Last-Event-ID` and `after`, only new events. The id of each is its `seq`: a client that reconnects with
        `Last-Event-ID` misses none. A comment is sent after a quiet period.
        """
        named = after if last_event_id is None else last_event_id
        begin = await feed.start_of(named)
        feed.join()
        chunks = _stream(feed, written, begin, run_id, limits.heartbeat_seconds, send_begin=named is None)
        chunks = while_allowed(chunks, lambda: auth.allows(request, TokenRole.VIEWER))
        return StreamedResponse(chunks, EVENT_STREAM, limits.stall_seconds, on_close=feed.leave)

    return routes


async def _stream(
    feed: EventFeed,
    written: EventLines,
    begin: int,
    run_id: str | None,
    heartbeat_seconds: float,
    *,
    send_begin: bool,
) -> AsyncGenerator[bytes, None]:
    """Yield events after `begin`, or only those of `run_id`, until the feed closes or the store fails.

    `send_begin`: send `begin` as an ID first, for clients that are cut off early.
    """
    clock = asyncio.get_running_loop().time
    position, sent_at = begin, clock()
    first_id = f"id: {begin}\n" if send_begin else ""
    yield f"retry: {_RETRY_MILLISECONDS}\n{first_id}\n".encode()
    while not feed.closed:
        try:
            events = await feed.after(position, max(0.0, sent_at + heartbeat_seconds - clock()))
        except StoreUnavailable:
            return
        if events:
            position = events[-1].seq or position
        lines = [written.line(event) for event in events if run_id is None or event.run_id == run_id]
        if lines:
            yield b"".join(lines)
            sent_at = clock()
        elif clock() >= sent_at + heartbeat_seconds:
            yield b": still here\n\n"
            sent_at = clock()


class EventLines:
    """Cache of events in the stream's format, which all clients share."""

    def __init__(self, most_bytes: int = _KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: dict[int, tuple[Event, bytes]] = {}
        self._bytes = 0

    def line(self, event: Event) -> bytes:
        assert event.seq is not None, "the history gives events their seq"
        kept = self._kept.get(event.seq)
        if kept is not None and kept[0] == event:
            return kept[1]
        self._drop(event.seq)  # its seq may be from a store that was replaced
        line = _line(event)
        self._kept[event.seq] = event, line
        self._bytes += len(line)
        while self._bytes > self._most_bytes:
            self._drop(next(iter(self._kept)))
        return line

    def _drop(self, seq: int) -> None:
        kept = self._kept.pop(seq, None)
        if kept is not None:
            self._bytes -= len(kept[1])


def _line(event: Event) -> bytes:
    # One-line JSON has no line break, and the engine defines the kinds. So no external text can begin a line and forge
    # a field of the stream.
    view = views.event(event)
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (view.seq, view.kind.encode(), views.one_line(view))
