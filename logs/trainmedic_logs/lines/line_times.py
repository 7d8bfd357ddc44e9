"""Times at the beginning of log lines, in common formats."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from enum import StrEnum
from typing import Any, NamedTuple

from trainmedic_logs.lines.times import with_zone

AHEAD = timedelta(minutes=2)
"""Allowed clock difference."""
_EARLIEST = datetime(2000, 1, 1, tzinfo=UTC)  # clocks without battery begin at 1970
_SEARCHED = 240  # characters
_ANY_TIME = re.compile(r"\d\d:\d\d:\d\d|\d{6}|\d\d\d\d-\d\d-\d\d")
_LEVEL_WORD = r"(?:TRACE|DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|CRITICAL|FATAL|trace|debug|info|warning|warn|error|fatal)"
_TAG = rf"(?:{_LEVEL_WORD}|[A-Za-z][\w./-]{{0,40}}|[Rr]ank[ _:=]?\d{{1,6}}|\d{{1,6}})(?:\|[^\[\]|]{{1,80}})?"
_TAG_BEFORE_TIME = re.compile(
    rf"[ \t]*(?:\[{_LEVEL_WORD}\|(?=\d)|\[{_TAG}\]|\[(?:NeMo [A-Z]|{_LEVEL_WORD}) (?=\d)"
    rf"|{_LEVEL_WORD}(?::[A-Za-z_][\w.]{{0,60}}:|\b)"
    rf"|\((?:[\w.<>:+-]{{1,80}} )?pid=\d{{1,8}}[^()]{{0,60}}\)|<\d{{1,3}}>)[ \t]*(?:[:|>,-][ \t]*)?"
)
_MOST_TAGS = 4
# Groups of most patterns: y, mo, d, h, m, s, f (fraction of a second) and z (zone).
_CLOCK = r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)(?:[.,:](?P<f>\d{1,9}))?"
_END = r"(?![\d:/])"
_ZONE = r"(?: ?(?P<z>Z|UTC|GMT|[+-]\d\d:?\d\d)(?![\d:]))?"
_ISO = re.compile(rf"(?P<y>\d{{4}})[-/.](?P<mo>\d\d)[-/.](?P<d>\d\d)(?:[T_]|,? ){_CLOCK}{_ZONE}{_END}")
_COMPACT = re.compile(
    rf"(?P<y>20\d\d)(?P<mo>\d\d)(?P<d>\d\d)(?:[ T_-]{_CLOCK}|[T_-](?P<h2>\d\d)(?P<m2>\d\d)(?P<s2>\d\d)){_ZONE}{_END}"
)
_SLASHED = re.compile(rf"(?P<a>\d\d)/(?P<b>\d\d)/(?P<c>\d{{4}}|\d\d),? {_CLOCK}(?: ?(?P<half>[AaPp][Mm]))?{_END}")
_GLOG = re.compile(rf"[TDIWEFC](?P<y>20\d\d)?(?P<mo>\d\d?)(?P<d>\d\d) {{1,2}}{_CLOCK}{_END}")
_MONTH_DAY = re.compile(rf"(?P<mo>\d\d)-(?P<d>\d\d) {_CLOCK}{_END}")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_NAMES = "|".join(_MONTHS)
_NAMED = re.compile(
    rf"(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? )?"
    rf"(?:(?P<name>{_NAMES}) {{1,2}}(?P<d>\d\d?)"
    rf"|(?P<d2>\d\d?)[ /-](?P<name2>{_NAMES})(?:[ /-](?P<y2>\d{{4}}))?)"
    rf"[ :]{_CLOCK}{_ZONE}(?: (?:[A-Z]{{3,4}} )?(?P<y>(?:19|20)\d\d)(?!\d))?{_END}"
)
_EPOCH = re.compile(r"(?P<s>1\d{9}|2\d{9})(?:\.(?P<f>\d{1,9})|(?P<t>\d{3}|\d{6}|\d{9}))?(?![\d.\w])")
_BARE_CLOCK = re.compile(rf"{_CLOCK}{_END}")
_AFTER_WEAK = re.compile(rf"\]|[ \t]*(?:[|\[:-]|{_LEVEL_WORD}\b)")
_LOGFMT = re.compile(
    r"(?:[a-z_]{1,20}=\S{1,40} )?(?:time|ts|timestamp|at)=\"?(?P<value>[^\s\"]{8,40}(?: [\d:.,]{8,20})?)"
)
_MEMBERS = ("ts", "time", "timestamp", "@timestamp", "asctime", "datetime", "created")
_LONGEST_RECORD = 64 * 1024


class Lacks(StrEnum):
    """Missing part of a time, besides the zone."""

    NOTHING = "nothing"
    YEAR = "year"
    DATE = "date"


class Stated(NamedTuple):
    """Time as written in a line."""

    walls: tuple[datetime, ...]
    """Naive without a zone. Several if the order of day, month and year is ambiguous."""
    lacks: Lacks = Lacks.NOTHING
    is_weak: bool = False
    """Counts only close to the line's arrival."""

    @property
    def has_zone(self) -> bool:
        return self.walls[0].tzinfo is not None


def stated(text: str) -> Stated | None:
    """Return the time at the beginning, after up to 4 tags."""
    beginning = text[:_SEARCHED]
    if text.startswith("{"):
        return _time_of_record(text)
    if _ANY_TIME.search(beginning) is None:
        return None
    if "=" in beginning[:60] and (match := _LOGFMT.match(beginning)):
        return _time_at(match["value"], is_bracketed=True)
    position = 0
    for _ in range(_MOST_TAGS):
        if (time_there := _time_at(beginning, position)) is not None:
            return time_there
        tag = _TAG_BEFORE_TIME.match(beginning, position)
        if tag is None or tag.end() == position:
            return None
        position = tag.end()
    return _time_at(beginning, position)


def moment(time: Stated, zone: tzinfo | None, latest: datetime, expected: datetime | None = None) -> datetime | None:
    """Return the stated time in UTC, None if it is before 2000 or over `AHEAD` after `latest`.

    `zone` applies to times without one; None is the local zone. An ambiguous time is the nearest to `expected`, else
    the latest.
    """
    fitting = [at for at in _moments(time, zone, latest) if _EARLIEST <= at <= latest + AHEAD]
    if not fitting:
        return None
    return max(fitting) if expected is None else min(fitting, key=lambda at: abs(at - expected))


def _moments(time: Stated, zone: tzinfo | None, latest: datetime) -> Iterator[datetime]:
    for wall in time.walls:
        if wall.tzinfo is not None:
            yield wall.astimezone(UTC)
            continue
        for filled in _completed(wall, time.lacks, latest.astimezone(zone)):
            for fold in (0, 1):
                try:
                    yield filled.replace(tzinfo=zone, fold=fold).astimezone(UTC)
                except (ValueError, OverflowError, OSError):
                    continue


def _completed(wall: datetime, lacks: Lacks, latest: datetime) -> Iterator[datetime]:
    if lacks is Lacks.NOTHING:
        yield wall
    elif lacks is Lacks.YEAR:
        for year in (latest.year - 1, latest.year, latest.year + 1):
            try:
                yield wall.replace(year=year)
            except ValueError:  # 29 February, or outside the calendar
                continue
    else:
        for days in (-1, 0, 1):
            day = (latest + timedelta(days=days)).date()
            yield datetime.combine(day, wall.time())


def _time_at(text: str, position: int = 0, *, is_bracketed: bool = False) -> Stated | None:
    position = len(text) - len(text[position:].lstrip(" \t"))
    if text[position : position + 1] in ("[", "<", "("):
        position, is_bracketed = position + 1, True
    begins = text[position : position + 1]
    if begins.isdigit():
        return _time_from_digit(text, position, is_bracketed)
    if begins and (match := _GLOG.match(text, position)):
        year = int(match["y"]) if match["y"] else None
        return _from_date(match, year, int(match["mo"]), int(match["d"]))
    if begins and (match := _NAMED.match(text, position)):
        return _with_month_name(match)
    return None


def _with_month_name(match: re.Match[str]) -> Stated | None:
    written = match["y"] or match["y2"]
    month = _MONTHS.index(match["name"] or match["name2"]) + 1
    return _from_date(match, int(written) if written else None, month, int(match["d"] or match["d2"]))


def _time_from_digit(text: str, position: int, is_bracketed: bool) -> Stated | None:
    for pattern in (_ISO, _COMPACT):
        if match := pattern.match(text, position):
            return _from_date(match, int(match["y"]), int(match["mo"]), int(match["d"]))
    if match := _SLASHED.match(text, position):
        return _slashed(match)
    if match := _MONTH_DAY.match(text, position):
        return _from_date(match, None, int(match["mo"]), int(match["d"]))
    if match := _NAMED.match(text, position):
        return _with_month_name(match)
    # A bare number is weak, and a bare clock is no time, unless brackets, a fraction or what follows sets it apart.
    if match := _EPOCH.match(text, position):
        is_apart = is_bracketed or match["f"] is not None or _AFTER_WEAK.match(text, match.end()) is not None
        return _since_epoch(match, is_weak=not is_apart)
    if match := _BARE_CLOCK.match(text, position):
        wall = _wall_time(match, 2000, 1, 1)  # stands for the missing date
        is_apart = is_bracketed or match["f"] is not None or _AFTER_WEAK.match(text, match.end()) is not None
        return Stated((wall,), Lacks.DATE, is_weak=True) if wall is not None and is_apart else None
    return None


def _from_date(match: re.Match[str], year: int | None, month: int, day: int) -> Stated | None:
    wall = _wall_time(match, 2000 if year is None else year, month, day)  # a leap year stands for a missing one
    if wall is None:
        return None
    return Stated((wall,), Lacks.YEAR if year is None else Lacks.NOTHING)


def _slashed(match: re.Match[str]) -> Stated | None:
    """Read month/day/year (Python, Rich), day first, or year first (Spark)."""
    first, second, third = int(match["a"]), int(match["b"]), int(match["c"])
    year = third if third >= 100 else 2000 + third
    orders = [(year, first, second), (year, second, first)]
    if third < 100:
        orders.append((2000 + first, second, third))
    hours = {"p": 12, "a": 0}.get((match["half"] or "")[:1].lower())
    walls = [wall for order in orders if (wall := _wall_time(match, *order)) is not None]
    if hours is not None:
        walls = [wall.replace(hour=wall.hour % 12 + hours) for wall in walls]
    return Stated(tuple(dict.fromkeys(walls))) if walls else None


def _wall_time(match: re.Match[str], year: int, month: int, day: int) -> datetime | None:
    parts = match.groupdict()
    hour, minute, second = (parts[name] or parts.get(f"{name}2") or "" for name in "hms")
    microsecond = int(f"{(parts['f'] or '0')[:6]:0<6}")
    try:
        # A leap second counts as the last second of its minute.
        wall = datetime(year, month, day, int(hour), int(minute), min(int(second), 59), microsecond)
    except ValueError:
        return None
    zone = parts.get("z")
    if zone is None:
        return wall
    return with_zone(f"{wall.isoformat()}{'Z' if zone in ('UTC', 'GMT') else zone}")


def _since_epoch(match: re.Match[str], *, is_weak: bool) -> Stated | None:
    digits = (match["f"] or match["t"] or "0")[:6]
    try:
        at = datetime.fromtimestamp(int(match["s"]), UTC) + timedelta(microseconds=int(f"{digits:0<6}"))
    except (ValueError, OverflowError, OSError):
        return None
    return Stated((at,), is_weak=is_weak)


def _time_of_record(text: str) -> Stated | None:
    end = text.rstrip()
    if not end.endswith("}") or len(end) > _LONGEST_RECORD or not any(f'"{name}"' in end for name in _MEMBERS):
        return None
    try:
        record: Any = json.loads(end)
    except (ValueError, RecursionError):
        return None
    for name in _MEMBERS if isinstance(record, dict) else ():
        value = record.get(name)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            continue
        written = f"{value:.6f}" if isinstance(value, float) else str(value)
        if (time_there := _time_at(written, is_bracketed=True)) is not None and time_there.lacks is not Lacks.DATE:
            return time_there
    return None
