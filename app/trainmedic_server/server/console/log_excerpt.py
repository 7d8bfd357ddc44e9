"""Reads one page of lines from a job's log, from either end, by searches that the API bounds.

The API answers the oldest lines first. For the newest ones the page searches back from its end in windows that grow
until they hold enough lines, and shrink where they hold too many.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct, field

from trainmedic_server.domain.log_search import written
from trainmedic_server.server.console.log_line import ShownLine
from trainmedic_server.server.console.log_view import NEWEST, LogPlace, LogView
from trainmedic_server.server.log_lines import MOST_LINES
from trainmedic_server.server.problems import HttpProblem

Ask = Callable[[dict[str, Any]], AsyncGenerator[dict[str, Any] | None, None]]
"""Asks the API for the lines of the view's job by these parameters. Raises HttpProblem."""
PAGE_LINES = 200
_WINDOW_LINES = 2000
"""Lines of one window; one that has more is searched in parts."""
_WINDOW_CHARACTERS = 8_000_000
_FIRST_WINDOW = timedelta(seconds=30)
_LEAST_WINDOW = timedelta(milliseconds=1)
_GROWTH = 8
_MOST_SECONDS = 20.0
"""How long a page is looked for; then it shows what was found, and where the search goes on."""
_JUST_BEFORE = timedelta(microseconds=1)
_MOST_NOTES = 20


class LogExcerpt(Struct, frozen=True):
    """The lines of one page, in the view's order."""

    lines: list[ShownLine]
    notes: list[str]
    older: LogPlace | None = None
    """Where older lines end; None where there are none, or where nobody looked."""
    newer: LogPlace | None = None
    """Where newer lines begin, in a page of the oldest first."""
    end: LogPlace | None = None
    """Behind the newest line; None without lines."""


class _Window(Struct):
    """What one search has answered, oldest first."""

    lines: deque[ShownLine] = field(default_factory=deque)
    notes: list[str] = field(default_factory=list)
    is_full: bool = False
    """Whether there may be more lines."""


async def read(view: LogView, ask: Ask, now: datetime, count: int = PAGE_LINES) -> LogExcerpt:
    """The page of `view`. Raises HttpProblem."""
    return await (_newest(view, ask, now, count) if view.order == NEWEST else _oldest(view, ask, count))


async def _oldest(view: LogView, ask: Ask, count: int) -> LogExcerpt:
    place = view.after
    passed = place.passed if place is not None else 0
    window = await _search(view, ask, place.at if place is not None else view.since, view.until, passed + count + 1)
    lines = list(window.lines)
    if place is not None:
        lines = lines[sum(line.at == place.at for line in lines[:passed]) :]
    shown = lines[:count]
    end = _behind(shown, place)
    return LogExcerpt(shown, _once(window.notes), newer=end if len(lines) > count or window.is_full else None, end=end)


async def _newest(view: LogView, ask: Ask, now: datetime, count: int) -> LogExcerpt:
    place = view.before
    ceiling = place.at + _JUST_BEFORE if place is not None else view.until
    wanted = count + 1 + (place.passed if place is not None else 0)
    top, span, lines, notes = min(ceiling or now, now), _FIRST_WINDOW, deque[ShownLine](), list[str]()
    reached, is_narrowed, began = top, False, time.monotonic()
    while True:
        lower = max(view.since, top - span)
        window = await _search(view, ask, lower, ceiling, max(_WINDOW_LINES, wanted))
        if window.is_full and top - lower > _LEAST_WINDOW:
            # What it did not answer is newer than what it did.
            span = max(min((top - lower) / _GROWTH, top - window.lines[-1].at), _LEAST_WINDOW)
            is_narrowed = True
            continue
        if window.is_full:  # so many lines share a time
            window = await _search(view, ask, lower, ceiling, MOST_LINES, kept=wanted)
        lines.extendleft(reversed(window.lines))
        notes += window.notes
        reached = lower
        took = time.monotonic() - began
        if len(lines) >= wanted or lower <= view.since or took > _MOST_SECONDS:
            break
        # A node that keeps the search waiting is asked once more, for all the rest, and not for each part of it.
        is_slow = took > _MOST_SECONDS / 4 and not is_narrowed
        top = ceiling = lower
        span = top - view.since if is_slow else span * (2 if is_narrowed else _GROWTH)
    if place is not None:
        for _ in range(place.passed):
            if lines and lines[-1].at == place.at:
                lines.pop()
    shown = list(lines)[-count:]
    if len(lines) > count:
        older: LogPlace | None = _before(shown, place)
    else:
        older = LogPlace(reached - _JUST_BEFORE) if reached > view.since else None
        if older is not None:
            notes.append(f"The search took long and has come back to {written(reached)}; Older goes on from there.")
    return LogExcerpt(shown[::-1], _once(notes), older=older, end=_behind(shown, None))


async def _search(
    view: LogView, ask: Ask, since: datetime, until: datetime | None, most: int, kept: int | None = None
) -> _Window:
    """The oldest `most` lines from `since` on; of those no more than the last `kept`. Raises HttpProblem."""
    window = _Window(deque(maxlen=kept))
    count = characters = 0
    limit = min(most, MOST_LINES)
    try:
        async with aclosing(ask(view.asked(since, until, limit=limit))) as documents:
            async for document in documents:
                line = _taken(document, window.notes)
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
        window.notes.append(problem.detail)  # the answer broke off: what has come is shown
    window.is_full = window.is_full or count >= limit
    # This page has a bound of its own, and says itself how to see more.
    is_ours = f"more than {limit} lines answer"
    window.notes = [note for note in window.notes if kept is not None or not note.startswith(is_ours)]
    return window


def _taken(document: dict[str, Any] | None, notes: list[str]) -> ShownLine | None:
    """The line of a document; None for a sign of life, a note, which goes to `notes`, and for what is no line."""
    if document is None:
        return None
    if "note" in document:
        notes.append(str(document["note"]))
        return None
    try:
        return ShownLine.of(document)
    except ValueError:  # of a newer part of the API
        return None


def _before(shown: list[ShownLine], place: LogPlace | None) -> LogPlace:
    """The place before the oldest of the lines, which come before `place`."""
    at = shown[0].at
    passed = sum(line.at == at for line in shown)
    return LogPlace(at, passed + (place.passed if place is not None and place.at == at else 0))


def _behind(shown: list[ShownLine], place: LogPlace | None) -> LogPlace | None:
    """The place behind the newest of the lines, which come after `place`."""
    if not shown:
        return place
    at = shown[-1].at
    passed = sum(line.at == at for line in shown)
    return LogPlace(at, passed + (place.passed if place is not None and place.at == at else 0))


def _once(notes: list[str]) -> list[str]:
    """Each note once."""
    return list(dict.fromkeys(notes))[:_MOST_NOTES]
