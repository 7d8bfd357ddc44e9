"""Matching lines of one file, from the first possible match on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import time
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from functools import cache

from trainmedic_agent.log_reading.arrivals import ArrivalIndex
from trainmedic_agent.log_reading.line_cutter import LineCutter
from trainmedic_agent.log_search.line_clock import BEGINNING, SLACK, LineClock
from trainmedic_agent.log_search.line_filter import LineFilter
from trainmedic_agent.log_search.wanted_lines import FilePlace, LinesOfFile, ReadBudget
from trainmedic_logs.domain import file_times
from trainmedic_logs.domain.finding import Origin
from trainmedic_logs.lines.line_times import AHEAD, Stated

# statx(2)
_AT_EMPTY_PATH = 0x1000
_STATX_BTIME = 0x800
_STATX_BYTES = 256
_BTIME_OFFSET = 80
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def born_at(fd: int) -> datetime | None:
    """Return the file's creation time. None if it is not recorded."""
    statx = _statx()
    if statx is None:
        return None
    facts = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_BTIME, facts) != 0:
        return None
    (mask,) = struct.unpack_from("=I", facts, 0)
    seconds, nanoseconds = struct.unpack_from("=qI", facts, _BTIME_OFFSET)
    if not mask & _STATX_BTIME or seconds <= 0:
        return None
    return _EPOCH + timedelta(seconds=seconds, microseconds=nanoseconds // 1000)


@cache
def _statx() -> ctypes._NamedFuncPointer | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).statx
    except (AttributeError, OSError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
    return function


PIECE = 256 * 1024  # bytes per read
UNTIMED_BYTES = 1024 * 1024  # bytes searched at the end of files without times
_BISECTED_BYTES = 256 * 1024  # bytes at which a bisection ends
_MANY_BYTES = 4 * 1024 * 1024  # if more arrived since the window's begin, bisect by stated times too: see `_skip_old`
_BYTES_BEFORE = 64 * 1024  # bytes read before the first match, for the time of an earlier line
_PROBE = 64 * 1024  # bytes of a probe for a time
_PROBES = 4  # most probes for one time
_MARKED_BYTES = 64  # bytes before a place, whose checksum is its mark
_QUIET_SECONDS = 10.0  # after this, a last line without line feed is complete


class FileLines(LinesOfFile):
    def __init__(
        self,
        fd: int,
        origin: Origin,
        line_filter: LineFilter,
        budget: ReadBudget,
        arrivals: ArrivalIndex | None = None,
        zone: tzinfo | None = None,
    ) -> None:
        """If arrivals are known, read the file's end, to learn its zone. Raises OSError."""
        self._fd = fd
        facts = os.fstat(fd)
        self._size = facts.st_size
        written_at = min(file_times.written_at(facts), datetime.now(UTC))
        known = arrivals.of((facts.st_dev, facts.st_ino), facts.st_size) if arrivals is not None else None
        clock = LineClock(written_at, arrivals=known, born_at=born_at(fd), zone=zone)
        super().__init__(f"{facts.st_dev:x}-{facts.st_ino:x}", origin, line_filter, clock, budget)
        self.is_whole = time.time() - facts.st_mtime > _QUIET_SECONDS
        self._cutter = LineCutter()
        if known is not None:
            clock.learn_zone(self._last_stated())

    def begin(self, places: Mapping[str, FilePlace]) -> None:
        """Continue at this file's place, or before the first possible match. Raises OSError."""
        place = places.get(self.key)
        self.go_to(place if place is not None and self.contains(place) else self._first_place())

    def contains(self, place: FilePlace) -> bool:
        """Return whether the place's mark fits this file. Raises OSError."""
        return place.offset <= self._size and place.mark in (0, self._mark(place.offset))

    def marked(self, place: FilePlace) -> FilePlace:
        try:
            return place._replace(mark=self._mark(place.offset))
        except OSError:  # this file can no longer be read, but the others' lines are found
            return place

    def _mark(self, offset: int) -> int:
        begin = max(offset - _MARKED_BYTES, 0)
        return zlib.crc32(os.pread(self._fd, offset - begin, begin)) or 1  # 0 means no mark

    @property
    def _has_unread(self) -> bool:
        return self._cutter.offset < self._size

    def _next_piece(self) -> bytes:
        self._skip_hole()
        return os.pread(self._fd, min(PIECE, max(self._size - self._cutter.offset, 0)), self._cutter.offset)

    def _skip_hole(self) -> None:
        data = self._next_data(self._cutter.offset)
        if data > self._cutter.offset:
            self._waiting.extend(self._cutter.take_unfinished_line())
            self._cutter = LineCutter(min(data, self._size))

    def _next_data(self, offset: int) -> int:
        if offset < self._size:
            with contextlib.suppress(OSError):  # holes are not reported, or the rest is one
                return os.lseek(self._fd, offset, os.SEEK_DATA)
        return offset

    def _last_stated(self) -> list[tuple[int, Stated]]:
        """Return the last times that lack a zone, with end offsets."""
        begin = max(self._size - _PROBE, 0)
        stated: list[tuple[int, Stated]] = []
        for place, raw in LineCutter(begin, begin > 0).feed(os.pread(self._fd, _PROBE, begin)):
            _, written = self._times_in(raw)
            if written is not None:
                stated.append((place + len(raw), written))
        return stated[-100:]  # enough to learn the zone

    def _first_place(self) -> FilePlace:
        """Return a place before the first line since `since`, by bisection."""
        since = self._wanted.query.since
        low, high = 0, self._size
        arrivals = self.clock.arrivals
        if arrivals is not None:
            # A line states a time before its arrival, or with a wrong clock a little after it.
            wanted = since - AHEAD
            high = low = arrivals.first_offset(wanted)
            arrival = arrivals.of(low, wanted) if low < self._size else None
            is_imprecise = arrival is not None and (arrival.after is None or arrival.at - arrival.after > AHEAD)
            if arrival is not None and is_imprecise:
                high = min(arrival.until, self._size)
            elif self._size - low > _MANY_BYTES:
                low = high = self._skip_old(low, since - SLACK)
        while high - low > _BISECTED_BYTES:
            middle = (low + high) // 2
            if self._next_data(middle) >= high:  # only a hole
                high = middle
                continue
            at = self._time_at(middle, high)
            if at is None:
                self.is_untimed = arrivals is None
                low = max(high - UNTIMED_BYTES, low) if self.is_untimed else low
                break
            low, high = (low, middle) if at >= since else (middle, high)
        low = max(low - _BYTES_BEFORE, 0)
        return FilePlace(low, low > 0, BEGINNING)

    def _skip_old(self, low: int, since: datetime) -> int:
        """Return a place before which ordered lines state times before `since`: copied files arrive late."""
        high = self._size
        while high - low > _BISECTED_BYTES:
            middle = (low + high) // 2
            at = self._time_at(middle, high, is_latest=True)
            if at is None:
                break
            low, high = (low, middle) if at >= since else (middle, high)
        return low

    def _time_at(self, offset: int, before: int, *, is_latest: bool = False) -> datetime | None:
        """Return the first time from `offset` on, with `is_latest` the latest in the same piece.

        None if none is within `_PROBES` pieces or before `before`.
        """
        for _ in range(_PROBES):
            offset = self._next_data(offset)
            if offset >= before:
                return None
            raw = os.pread(self._fd, _PROBE, offset)
            self._budget.take(len(raw))
            latest: datetime | None = None
            for place, line in LineCutter(offset, True).feed(raw)[:1000]:  # bounds the parsing of short lines
                if (at := self._stated_by(place, line)) is not None:
                    latest = at if latest is None else max(at, latest)
                    if not is_latest:
                        break
            if latest is not None:
                return latest
            offset += _PROBE
        return None
