"""One page of lines of a job's log."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct, field

from trainmedic_logs.domain.log_search import written
from trainmedic_server.console.log_line import ShownLine
from trainmedic_server.console.log_view import NEWEST, LogPlace, LogView
from trainmedic_server.http.problems import HttpProblem
from trainmedic_server.live.log_lines import MOST_LINES

Ask = Callable[[dict[str, Any]], AsyncGenerator[dict[str, Any] | None, None]]
"""Calls the API for lines of the view's job. Raises HttpProblem."""
PAGE_LINES = 200
_WINDOW_LINES = 2000  # a window with more lines is searched in parts
_WINDOW_CHARACTERS = 8_000_000  # bounds the memory
_FIRST_WINDOW = timedelta(seconds=30)
_LEAST_WINDOW = timedelta(milliseconds=1)  # not shortened, however many lines it has
_GROWTH = 8
"""Factor from a window to the next longer or shorter one."""
_MOST_SECONDS = 20.0  # after which no further window is searched; the page links to the rest
_JUST_BEFORE = timedelta(microseconds=1)  # smallest step: `until` excludes its own time
_MOST_NOTES = 20


class LogExcerpt(Struct, frozen=True):
    lines: list[ShownLine]
    notes: list[str]
    older: LogPlace | None = None
    """End of the older lines. None if there are none, or on a page with the oldest first."""
    newer: LogPlace | None = None
    """Start of the newer lines, on a page with the oldest first."""
    end: LogPlace | None = None
    """Place after the newest line. Without lines, the page's own `after`, if any."""


class _Window(Struct):
    lines: deque[ShownLine] = field(default_factory=deque)
    notes: list[str] = field(default_factory=list)
    is_full: bool = False  # True if there may be more lines


async def read(view: LogView, ask: Ask, now: datetime, count: int = PAGE_LINES) -> LogExcerpt:
    return await (_newest(view, ask, now, count) if view.order == NEWEST else _oldest(view, ask, count))


async def _oldest(view: LogView, ask: Ask, count: int) -> LogExcerpt:
    place = view.after
    passed = place.passed if place is not None else 0
    window = await _search(view, ask, place.at if place is not None else view.since, view.until, passed + count + 1)
    lines = list(window.lines)
    if place is not None:  # the page before has shown these lines
        lines = lines[sum(line.at == place.at for line in lines[:passed]) :]
    shown = lines[:count]
    end = _place_at(shown[-1].at, shown, place) if shown else place
    return LogExcerpt(
        shown, _distinct(window.notes), newer=end if len(lines) > count or window.is_full else None, end=end
    )


async def _newest(view: LogView, ask: Ask, now: datetime, count: int) -> LogExcerpt:
    """Search windows backwards, until there are `count` lines, or `view.since` or the time limit is reached."""
    place = view.before
    ceiling = place.at + _JUST_BEFORE if place is not None else view.until  # the API's `until`; None: open
    wanted = count + 1 + (place.passed if place is not None else 0)
    lines, notes = deque[ShownLine](), list[str]()
    top, span = min(ceiling or now, now), _FIRST_WINDOW  # end and length of the next window
    searched_from, is_narrowed, began = top, False, time.monotonic()
    while True:
        lower = top - min(span, top - view.since)
        window = await _search(view, ask, lower, ceiling, max(_WINDOW_LINES, wanted))
        if window.is_full and top - lower > _LEAST_WINDOW:
            # The missing lines are newer than the returned ones.
            span = max(min((top - lower) / _GROWTH, top - window.lines[-1].at), _LEAST_WINDOW)
            is_narrowed = True
            continue
        if window.is_full:  # very many lines have the same time
            window = await _search(view, ask, lower, ceiling, MOST_LINES, kept=wanted)
        lines.extendleft(reversed(window.lines))
        notes += window.notes
        searched_from = lower
        took = time.monotonic() - began
        if len(lines) >= wanted or lower <= view.since or took > _MOST_SECONDS:
            break
        # Ask a slow node once more for all the rest, and not for each part.
        is_slow = took > _MOST_SECONDS / 4 and not is_narrowed
        top = ceiling = lower
        span = top - view.since if is_slow else span * (2 if is_narrowed else _GROWTH)
    if place is not None:  # its page has shown these lines
        for _ in range(place.passed):
            if lines and lines[-1].at == place.at:
                lines.pop()
    shown = list(lines)[-count:]
    if len(lines) > count:
        older: LogPlace | None = _place_at(shown[0].at, shown, place)
    else:
        older = LogPlace(searched_from - _JUST_BEFORE) if searched_from > view.since else None
        if older is not None:
            notes.append(f"The search took too long and stopped at {written(searched_from)}. Older continues there.")
    end = _place_at(shown[-1].at, shown, None) if shown else None
    return LogExcerpt(shown[::-1], _distinct(notes), older=older, end=end)


async def _search(
    view: LogView, ask: Ask, since: datetime, until: datetime | None, most: int, kept: int | None = None
) -> _Window:
    window = _Window(deque(maxlen=kept))
    count = characters = 0
    limit = min(most, MOST_LINES)
    try:
        async with aclosing(ask(view.api_query(since, until, limit=limit))) as documents:
            async for document in documents:
                line = _line_of(document, window.notes)
                if line is None:
                    continue
                window.lines.append(line)
                count, characters = count + 1, characters + len(line.text)
                if kept is None and characters > _WINDOW_CHARACTERS:
                    window.is_full = True
                    break
    except HttpProblem as problem:
        if not window.lines:
            raise
        window.notes.append(problem.detail)  # the answer was cut off; its first lines are shown
    window.is_full = window.is_full or count >= limit
    # The page has its own limit, and its own way to show more.
    limit_note = f"more than {limit} lines answer"
    window.notes = [note for note in window.notes if kept is not None or not note.startswith(limit_note)]
    return window


def _line_of(document: dict[str, Any] | None, notes: list[str]) -> ShownLine | None:
    """Return None for a heartbeat, an unknown document, or a note, added to `notes`."""
    if document is None:
        return None
    if "note" in document:
        notes.append(str(document["note"]))
        return None
    try:
        return ShownLine.of(document)
    except ValueError:  # a newer API may send other documents
        return None


def _place_at(at: datetime, shown: list[ShownLine], place: LogPlace | None) -> LogPlace:
    """Return the place after this time's lines, including those on pages up to `place`."""
    passed = sum(line.at == at for line in shown)
    return LogPlace(at, passed + (place.passed if place is not None and place.at == at else 0))


def _distinct(notes: list[str]) -> list[str]:
    return list(dict.fromkeys(notes))[:_MOST_NOTES]
