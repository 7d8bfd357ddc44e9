"""Stream of new lines of a job's log. Lines beyond reading speed are dropped, with a note."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from trainmedic_logs.domain.log_search import written
from trainmedic_server import errors
from trainmedic_server.auth.tokens import TokenRole
from trainmedic_server.console import log_page
from trainmedic_server.console.app import Parts
from trainmedic_server.console.log_line import ShownLine
from trainmedic_server.console.log_view import LogPlace, LogView
from trainmedic_server.console.page_request import PageRequest
from trainmedic_server.http.limits import ServerLimits
from trainmedic_server.http.problems import HttpProblem, from_error
from trainmedic_server.http.streaming import StreamedResponse, while_allowed
from trainmedic_server.live.events import EVENT_STREAM

_MOST_ROWS = 300  # lines in one event
_BETWEEN_SECONDS = 0.5  # between two events, which collect lines
_LONGEST_GAP = timedelta(minutes=10)  # a reconnecting page gets missed lines of this period
_LONGEST_SECONDS = 2 * 3600.0
_MOST_NOTES = 10  # in one event
_FULL = (
    "{most} pages follow logs already, the maximum. Close one of them and press Follow again. Until then, use Search "
    "for new lines."
)
_OVER = "This page has followed the log for 2 hours. Press Follow to continue."
_ENDED = "The server ended the stream. Press Follow to continue."


class _Arrived(Struct, frozen=True):
    """`count` and `first` include dropped lines."""

    lines: list[ShownLine]
    notes: list[str]
    count: int
    first: datetime | None
    place: LogPlace | None


class _Incoming:
    """Buffer of the newest lines. It skips lines up to `place`, which the page has."""

    def __init__(self, documents: AsyncGenerator[dict[str, Any] | None, None], place: LogPlace | None) -> None:
        self.woken = asyncio.Event()
        self._lines: deque[ShownLine] = deque(maxlen=_MOST_ROWS)
        self._notes: list[str] = []
        self._count = 0
        self._first: datetime | None = None
        self._place = place  # after the newest line
        self._to_pass = place  # `passed` counts down the lines that the page has
        self.reading = asyncio.create_task(self._read(documents), name="log-follower")
        self.reading.add_done_callback(lambda _: self.woken.set())

    def take(self) -> _Arrived | None:
        if not self._count and not self._notes:
            return None
        arrived = _Arrived(list(self._lines), self._notes[:_MOST_NOTES], self._count, self._first, self._place)
        self._lines.clear()
        self._notes, self._count, self._first = [], 0, None
        return arrived

    async def _read(self, documents: AsyncGenerator[dict[str, Any] | None, None]) -> None:
        async with aclosing(documents):
            async for document in documents:
                if document is not None:
                    self._add(document)

    def _add(self, document: Mapping[str, Any]) -> None:
        if "note" in document:
            self._notes.append(str(document["note"]))
            self.woken.set()
            return
        try:
            line = ShownLine.of(document)
        except ValueError:  # a newer API may send other documents
            return
        if self._to_pass is not None and line.at == self._to_pass.at and self._to_pass.passed:
            self._to_pass = LogPlace(self._to_pass.at, self._to_pass.passed - 1)
            return
        self._lines.append(line)
        self._count += 1
        self._first = self._first or line.at
        place = self._place
        if place is None or line.at > place.at:
            self._place = LogPlace(line.at, 1)
        elif line.at == place.at:
            self._place = LogPlace(place.at, place.passed + 1)
        self.woken.set()


class LogFollower:
    def __init__(self, parts: Parts, limits: ServerLimits) -> None:
        self._parts = parts
        self._limits = limits
        self._pages = 0

    async def take(self, request: Request) -> Response:
        page = self._parts.page_request(request, {})
        view, wrong = LogView.read(page.query.get("job", ""), page.query, page.renderer.now())
        if wrong or not view.job:
            raise HttpProblem(HTTPStatus.UNPROCESSABLE_ENTITY, wrong or "job: is missing; name the job to follow.")
        has_room = self._pages < self._limits.followed_logs
        self._pages += has_room
        named = _place_or_none(request.headers.get("last-event-id", "")) or view.after
        events = self._events(page, view, named) if has_room else _refused(self._limits.followed_logs)

        async def close() -> None:
            self._pages -= has_room

        allowed = while_allowed(events, lambda: self._parts.auth.allows(request, TokenRole.VIEWER))
        return StreamedResponse(allowed, EVENT_STREAM, self._limits.stall_seconds, close)

    async def _events(self, page: PageRequest, view: LogView, place: LogPlace | None) -> AsyncGenerator[bytes, None]:
        yield b"retry: 3000\n\n"
        now = page.renderer.now()
        since = place.at if place is not None else now
        if since < now - _LONGEST_GAP:
            note = (
                f"The lines from {written(since)} until {written(now - _LONGEST_GAP)} are not loaded. Search for them."
            )
            yield _event("note", {"html": page.renderer.part("log_parts.html", "log_note", note)})
            since, place = now - _LONGEST_GAP, None
        query = {**view.api_query(since), "follow": "true"}
        query.pop("until", None)
        findings = await log_page.findings_of(page, view.job)
        incoming = _Incoming(page.api.documents(f"/jobs/{view.job}/logs", query), place)
        clock = asyncio.get_running_loop().time
        end = clock() + _LONGEST_SECONDS
        try:
            while clock() < end:
                if not await _wait_until_woken(incoming.woken, self._limits.heartbeat_seconds):
                    yield b": still here\n\n"
                    continue
                is_last = incoming.reading.done()
                arrived = incoming.take()
                if arrived is not None:
                    yield _lines_event(page, view, arrived, findings)
                if is_last:
                    error = incoming.reading.exception()
                    yield _event("over", {"why": _ENDED if error is None else _end_reason(error)})
                    return
                await asyncio.sleep(_BETWEEN_SECONDS)
            yield _event("over", {"why": _OVER})
        finally:
            incoming.reading.cancel()
            await asyncio.wait({incoming.reading})


def _lines_event(page: PageRequest, view: LogView, arrived: _Arrived, findings: list[Mapping[str, Any]]) -> bytes:
    notes = list(arrived.notes)
    left_out = arrived.count - len(arrived.lines)
    if left_out and arrived.first is not None:
        notes.append(f"{left_out:,} lines since {written(arrived.first)} came too fast to show. Search for them.")
    rows = log_page.rows(view, arrived.lines, findings)
    part = page.renderer.part
    pieces = {
        "html": part("log_parts.html", "log_rows", rows, view.job, view),
        "notes": "".join(part("log_parts.html", "log_note", note) for note in notes),
        "count": len(arrived.lines),
    }
    return _event("lines", pieces, str(arrived.place) if arrived.place is not None else "")


async def _refused(most: int) -> AsyncGenerator[bytes, None]:
    yield _event("over", {"why": _FULL.format(most=most)})


async def _wait_until_woken(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    event.clear()
    return True


def _event(kind: str, data: Mapping[str, Any], number: str = "") -> bytes:
    named = f"id: {number}\n" if number else ""
    return f"{named}event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def _place_or_none(text: str) -> LogPlace | None:
    try:
        return LogPlace.read(text)
    except ValueError:
        return None


def _end_reason(error: BaseException) -> str:
    return from_error(error).detail if isinstance(error, errors.TrainmedicError) else _ENDED
