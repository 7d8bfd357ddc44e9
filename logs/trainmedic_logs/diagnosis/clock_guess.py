"""Guessed times of lines, by their text.

A zone is ignored: all times count as UTC, so two nodes in the same zone still have an order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

ERROR = 30.0
"""Assumed clock error of a line's time, in seconds."""
UNKNOWN = 1e9
"""Clock error of an unknown time."""
# Earlier times mean "none", such as Go's 0001-01-01, and later ones "never", such as 9999-12-31 as a licence's end.
# In a file of modification time 0, as some archives have, a missing year may be 1969.
_FIRST, _NEVER = datetime(1969, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)

_FULL = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_GLOG = re.compile(r"\b[EWIF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,6})")
_CTIME = re.compile(r"\b[A-Z][a-z]{2} ([A-Z][a-z]{2}) {1,2}(\d{1,2}) (\d\d):(\d\d):(\d\d) (\d{4})\b")
_SYSLOG = re.compile(r"^(?:<\d{1,3}>)?([A-Z][a-z]{2}) {1,2}(\d{1,2}) (\d\d):(\d\d):(\d\d) ")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_SEARCHED_CHARACTERS = 120  # of up to 4 bytes each
_STAMP_WITHIN = 30  # characters
_HALF_A_YEAR = timedelta(days=180)
_Numbers: TypeAlias = tuple[int, int, int, int, int, int, int]
_TIME_OF_DAY = re.compile(rb"\d\d:\d\d:\d\d")


def of_line(raw: bytes, written: datetime) -> datetime | None:
    """Return the stated time, taken as UTC; None without one.

    A missing year is the latest that is at most a day after `written`, the file's modification time.
    """
    head = _head(raw)
    return _first_time(_possible_times(head, written)) if head else None


def with_year(raw: bytes) -> datetime | None:
    """Return the time if the line states its year too."""
    head = _head(raw)[:_STAMP_WITHIN]  # not the date of a build or a driver in the text
    return _first_time(_complete_times(head)) if head else None


def copied(written: datetime, latest: datetime | None) -> datetime:
    """Return the time that completes years if files were copied long after `latest`."""
    return written if latest is None or written - latest < _HALF_A_YEAR else latest + _HALF_A_YEAR


def _head(raw: bytes) -> str:
    if not _TIME_OF_DAY.search(raw, 0, _SEARCHED_CHARACTERS * 4):
        return ""
    return raw[: _SEARCHED_CHARACTERS * 4].decode(errors="replace")[:_SEARCHED_CHARACTERS]


def _first_time(possible: Iterator[_Numbers]) -> datetime | None:
    for numbers in possible:
        try:
            stated = datetime(*numbers, tzinfo=UTC)
        except ValueError:
            continue
        if is_time(stated):
            return stated
    return None


def is_time(at: datetime) -> bool:
    return _FIRST <= at < _NEVER


def _complete_times(head: str) -> Iterator[_Numbers]:
    if found := _FULL.search(head):
        *parts, fraction = found.groups()
        year, month, day, hour, minute, second = (int(part) for part in parts)
        yield year, month, day, hour, minute, second, _microseconds(fraction)
    if found := _CTIME.search(head):
        name, *parts, year_text = found.groups()
        if name in _MONTHS:
            day, hour, minute, second = (int(part) for part in parts)
            yield int(year_text), _MONTHS.index(name) + 1, day, hour, minute, second, 0


def _possible_times(head: str, written: datetime) -> Iterator[_Numbers]:
    yield from _complete_times(head)
    if found := _GLOG.search(head):
        month_text, *parts, fraction = found.groups()
        day, hour, minute, second = (int(part) for part in parts)
        month = int(month_text)
        yield _year(written, month, day), month, day, hour, minute, second, _microseconds(fraction)
    if (found := _SYSLOG.match(head)) and found[1] in _MONTHS:
        day, hour, minute, second = (int(part) for part in found.groups()[1:])
        month = _MONTHS.index(found[1]) + 1
        yield _year(written, month, day), month, day, hour, minute, second, 0


def _year(written: datetime, month: int, day: int) -> int:
    latest = written + timedelta(days=1)  # local times may be ahead of UTC
    return latest.year if (month, day) <= (latest.month, latest.day) else latest.year - 1


def _microseconds(fraction: str | None) -> int:
    return int(f"{fraction or '0':0<6}"[:6])
