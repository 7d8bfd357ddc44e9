"""Matching of lines and files with a query."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_agent.log_reading.line_cutter import PlacedLine
from trainmedic_agent.log_search.line_clock import LineTime
from trainmedic_core.expressions.regexes import SearchPattern
from trainmedic_core.expressions.required_text import required_patterns
from trainmedic_logs.domain.finding import Origin
from trainmedic_logs.domain.log_search import TIME, FoundLine, LogLevel, LogQuery
from trainmedic_logs.domain.log_sources import KERNEL_SOURCES
from trainmedic_logs.lines import raw_text
from trainmedic_logs.lines.prefilter import LineSearch

_KEY = "-----BEGIN"  # of a private key
_ESCAPED = rb"\{\"log\":\".*\\[^n]"  # escapes in a container's JSON log, which may hide a match


class LikelyLines:
    """Fast preselection for one pattern."""

    def __init__(self, patterns: Sequence[bytes]) -> None:
        self._search = LineSearch([*patterns, _KEY.encode(), _ESCAPED])

    @classmethod
    def of(cls, grep: str) -> LikelyLines | None:
        """Return None if every line must be checked."""
        patterns = required_patterns(grep) if grep else None
        return cls(patterns) if patterns is not None else None

    def among(self, lines: Sequence[PlacedLine], states_time: Callable[[PlacedLine], bool]) -> Sequence[PlacedLine]:
        """Return lines that may match, with the nearest timed lines around each."""
        raws = [raw for _, raw in lines]
        suspects = self._search.suspects(raws)
        if any(_KEY in raw_text.text_of(raws[at])[0] for at in suspects):
            return lines  # lines of a private key are always masked
        kept = set(suspects)
        states_time = cache(states_time)
        for after, until in zip([-1, *suspects], [*suspects, len(raws)], strict=True):
            kept.update(_first_timed(range(until - 1, after, -1), lines, states_time))
            kept.update(_first_timed(range(after + 1, until), lines, states_time))
        return [lines[at] for at in sorted(kept)]


def _first_timed(positions: range, lines: Sequence[PlacedLine], states_time: Callable[[PlacedLine], bool]) -> list[int]:
    return next(([at] for at in positions if states_time(lines[at])), [])


# So that times can be added to the ends.
_EARLIEST, _LATEST = datetime(1971, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)
# Attributes that only a file's origin states, and those that its lines may state.
_OF_FILES = ("attempt", "node_rank")
_OF_LINES = ("rank", "local_rank")


class Answers(StrEnum):
    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"
    """A requested attribute is unknown."""


class LineFilter(Struct, frozen=True):
    query: LogQuery
    pattern: SearchPattern | None
    levels: frozenset[LogLevel]
    likely: LikelyLines | None = None
    """None: check every line."""

    @classmethod
    def of(cls, query: LogQuery) -> LineFilter:
        """Raises ValueError unless the pattern is valid RE2."""
        until = min(query.until, _LATEST) if query.until is not None else None
        query = replace(query, since=min(max(query.since, _EARLIEST), _LATEST), until=until)
        pattern = SearchPattern(query.grep) if query.grep else None
        levels = query.level.at_least if query.level is not None else frozenset(LogLevel)
        return cls(query, pattern, levels, LikelyLines.of(query.grep))

    def is_excluded(self, level: LogLevel, moment: LineTime) -> bool:
        return level not in self.levels or self._window_contains(moment) is False

    def answer(self, line: FoundLine, moment: LineTime) -> tuple[Answers, str]:
        """Return the answer, and for UNKNOWN the unknown attribute."""
        is_in_window = self._window_contains(moment)
        if is_in_window is False or line.level not in self.levels:
            return Answers.NO, ""
        missing = TIME if is_in_window is None else ""
        if line.source not in KERNEL_SOURCES:
            for name in _OF_LINES:
                asked, stated = getattr(self.query, name), getattr(line, name)
                if asked is not None and stated is None:
                    missing = missing or name
                elif asked is not None and asked != stated:
                    return Answers.NO, ""
        if self.pattern is not None and self.pattern.search(line.text.encode()) is None:
            return Answers.NO, ""
        return (Answers.UNKNOWN, missing) if missing else (Answers.YES, "")

    def _window_contains(self, moment: LineTime) -> bool | None:
        """Return None if the time is too uncertain."""
        since, until = self.query.since, self.query.until
        if moment.is_vague and moment.earliest is not None:
            if moment.at < since or (until is not None and moment.earliest >= until):
                return False
            is_certain = moment.earliest >= since and (until is None or moment.at < until)
            return True if is_certain else None
        return moment.at >= since and (until is None or moment.at < until)


def unknown_of_file(origin: Origin, query: LogQuery) -> str | None:
    """Return a requested attribute that the file does not state; empty if it can match, None if it cannot."""
    missing = ""
    for name in _OF_FILES:
        asked, stated = getattr(query, name), getattr(origin, name)
        if asked is not None and stated is None:
            missing = missing or name
        elif asked is not None and asked != stated:
            return None
    for name in _OF_LINES:
        asked, stated = getattr(query, name), getattr(origin, name)
        if asked is not None and stated is not None and asked != stated:
            return None
    return missing
