"""The lines of one file, or of the kernel, that answer a query, from a place on, each with a time.

A line without a time of its own has that of the last line before it that says one; before the first of those, that of
the next one, or else of the file. So the lines of a file keep their order whatever they say.

Secrets are masked before anything is compared, so that no query can find them out.
"""

from __future__ import annotations

import os
import select
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from msgspec import Struct

from trainmedic_server.agent.log_reading.kernel_log import KernelReader
from trainmedic_server.agent.log_reading.line_cutter import LineCutter, PlacedLine
from trainmedic_server.agent.log_reading.log_files import open_log
from trainmedic_server.agent.log_search.likely_lines import LikelyLines
from trainmedic_server.domain.finding import Origin
from trainmedic_server.domain.log_search import FoundLine, LogLevel, LogQuery
from trainmedic_server.expressions.regexes import SearchPattern
from trainmedic_server.logs import kernel_text, prefixes, raw_text, times
from trainmedic_server.logs.records import record_of
from trainmedic_server.logs.told_line import LineMask, told

PIECE = 256 * 1024
UNTIMED_BYTES = 1024 * 1024
"""So much of the end is read of a file whose lines say no times."""
_NEAR = 256 * 1024
_PROBE = 64 * 1024
_PROBED_LINES = 200
_QUIET_SECONDS = 10.0
"""A last line without a line feed counts as whole when nothing was written for so long."""
KERNEL = "kernel"
_KERNEL_SECONDS = 0.5
_MOST_KERNEL_LINES = 200_000
_FIRST_TIME = datetime.min.replace(tzinfo=UTC)


class ReadBudget:
    """How much may be read for one answer."""

    def __init__(self, most_bytes: int, seconds: float) -> None:
        self._left = most_bytes
        self._until = time.monotonic() + seconds

    def take(self, count: int) -> None:
        self._left -= count

    @property
    def is_spent(self) -> bool:
        return self._left <= 0 or time.monotonic() > self._until


class FilePlace(NamedTuple):
    """From where on a file was not read yet."""

    offset: int = 0
    is_skipping: bool = False
    """What comes next is the rest of a line whose beginning was read."""
    at: datetime = _FIRST_TIME
    """The latest time that a line before it has said."""


class LineFilter(Struct, frozen=True):
    """A query, made ready for this node."""

    query: LogQuery
    pattern: SearchPattern | None
    levels: frozenset[LogLevel]
    likely: LikelyLines | None = None
    """Where it is known what the pattern needs."""

    @classmethod
    def of(cls, query: LogQuery) -> LineFilter:
        """Raises ValueError where its pattern is none of RE2."""
        pattern = SearchPattern(query.grep) if query.grep else None
        levels = query.level.at_least if query.level is not None else frozenset(LogLevel)
        return cls(query, pattern, levels, LikelyLines.of(query.grep))

    def takes(self, line: FoundLine) -> bool:
        query = self.query
        if line.at < query.since or (query.until is not None and line.at >= query.until):
            return False
        if query.rank is not None and line.rank != query.rank and line.source != "kernel":
            return False
        if line.level not in self.levels:
            return False
        return self.pattern is None or self.pattern.search(line.text.encode()) is not None


class WantedLines(ABC):
    """Lines of one stream that answer a query, one by one. The classes below say where they are read."""

    def __init__(self, key: str, origin: Origin, line_filter: LineFilter, written_at: datetime) -> None:
        self.key = key
        self.is_untimed = False
        self.skips_ranks = False
        """Whether lines are passed over before which torchrun has put a rank: they are in that rank's own file."""
        self.line_place = FilePlace()
        """Where the line is that was given out last."""
        self._origin = origin
        self._wanted = line_filter
        self._written_at = written_at
        self._booted_at = datetime.fromtimestamp(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME), UTC)
        self._latest = _FIRST_TIME
        self._mask = LineMask()
        self._waiting: deque[PlacedLine] = deque()

    @property
    @abstractmethod
    def place(self) -> FilePlace:
        """Behind the line that was given out or passed over last."""

    @abstractmethod
    def go_to(self, place: FilePlace) -> None:
        """Go on from there."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _read(self) -> bool:
        """Have lines wait; False where there are none now, or the budget is spent. Raises OSError."""

    def next(self) -> FoundLine | None:
        """The next line that answers the query; None at the end, or where the budget is spent. Raises OSError."""
        until = self._wanted.query.until
        while True:
            if not self._waiting and not self._read():
                return None
            if until is not None and self._latest >= until:
                return None
            before = self.place
            _, raw = self._waiting.popleft()
            line = self._line(raw)
            if line is not None and self._wanted.takes(line):
                self.line_place = before
                return line

    def _line(self, raw: bytes) -> FoundLine | None:
        line = told(raw, self._origin.source, self._booted_at)
        if line is None or (self.skips_ranks and line.local_rank is not None):
            return None
        origin = self._origin
        at, is_sure = self._timed(line.at)
        rank = line.rank if line.rank is not None else origin.rank
        text = self._mask.of(line.text)
        return FoundLine(at, text, origin.node, origin.source, line.level, origin.job, origin.attempt, rank, is_sure)

    def _timed(self, own_time: datetime | None) -> tuple[datetime, bool]:
        if own_time is not None:
            self._latest = max(self._latest, own_time)
            return own_time, True
        if self._latest == _FIRST_TIME:
            ahead = [raw for _, raw in list(self._waiting)[:_PROBED_LINES]]
            said_ahead = map(self._time_in, ahead)
            self._latest = next((at for at in said_ahead if at is not None), self._written_at)
        return self._latest, False

    def _time_in(self, raw: bytes) -> datetime | None:
        """The time that a line says, which counts for those after it. None for a line that is passed over."""
        text, _ = raw_text.text_of(raw)
        if self._origin.source == "kernel":
            return kernel_text.split(text, self._booted_at).at
        prefixed = prefixes.split(text, self._origin.source)
        if self.skips_ranks and prefixed.local_rank is not None:
            return None
        return prefixed.at or times.said_by(prefixed.text, record_of(prefixed.text))


class FileLines(WantedLines):
    """One file. It is known by its inode, so that one which was renamed meanwhile is read on."""

    def __init__(
        self, path: str, origin: Origin, places: Mapping[str, FilePlace], line_filter: LineFilter, budget: ReadBudget
    ) -> None:
        """`places` has where to go on, by file; one that is not there begins where the first line can be that is
        wanted. Raises OSError, LogRefused."""
        self._fd = open_log(path)
        facts = os.fstat(self._fd)
        key, written_at = f"{facts.st_dev:x}-{facts.st_ino:x}", datetime.fromtimestamp(facts.st_mtime, UTC)
        super().__init__(key, origin, line_filter, written_at)
        self._budget = budget
        self._size = facts.st_size
        self._is_quiet = time.time() - facts.st_mtime > _QUIET_SECONDS
        self._cutter = LineCutter()
        place = places.get(key)
        self.go_to(place if place is not None and place.offset <= self._size else self._begin())

    def close(self) -> None:
        os.close(self._fd)

    def go_to(self, place: FilePlace) -> None:
        self.line_place = place
        self._latest = place.at
        self._waiting.clear()
        self._cutter = LineCutter(place.offset, place.is_skipping)

    @property
    def place(self) -> FilePlace:
        if self._waiting:
            return FilePlace(self._waiting[0][0], False, self._latest)
        return FilePlace(self._cutter.resume_at, self._cutter.is_skipping, self._latest)

    def _read(self) -> bool:
        while not self._waiting:
            if self._budget.is_spent:
                return False
            piece = os.pread(self._fd, min(PIECE, max(self._size - self._cutter.offset, 0)), self._cutter.offset)
            self._budget.take(len(piece))
            if piece:
                self._waiting.extend(self._likely(self._cutter.feed(piece)))
            elif self._is_quiet and self._cutter.has_half_line:
                self._waiting.extend(self._cutter.half_line())
            else:
                return False
        return True

    def _likely(self, lines: list[PlacedLine]) -> Sequence[PlacedLine]:
        """Those of them that can matter to the answer."""
        likely = self._wanted.likely
        if likely is None or self._mask.is_in_key or self._origin.source == "kernel":
            return lines
        return likely.among(lines, lambda raw: self._time_in(raw) is not None, self._latest == _FIRST_TIME)

    def _begin(self) -> FilePlace:
        """A place before the first line since when lines are wanted, found by the times that lines say."""
        low, high = 0, self._size
        while high - low > _NEAR:
            middle = (low + high) // 2
            at = self._time_at(middle)
            if at is None:
                self.is_untimed = True
                low = max(self._size - UNTIMED_BYTES, low)
                break
            low, high = (low, middle) if at >= self._wanted.query.since else (middle, high)
        return FilePlace(low, low > 0)

    def _time_at(self, offset: int) -> datetime | None:
        raw = os.pread(self._fd, _PROBE, offset)
        self._budget.take(len(raw))
        for line in raw.split(b"\n")[1:_PROBED_LINES]:
            if (at := self._time_in(line)) is not None:
                return at
        return None


class KernelLines(WantedLines):
    """What the kernel keeps of its log, or the journal: all of this boot. A place is the number of a line."""

    def __init__(
        self, reader: KernelReader, origin: Origin, places: Mapping[str, FilePlace], line_filter: LineFilter
    ) -> None:
        """Raises OSError."""
        super().__init__(KERNEL, origin, line_filter, datetime.now(UTC))
        self._lines: list[PlacedLine] = []
        while more := reader.read() or self._awaited(reader):
            self._lines += more
        self.go_to(places.get(KERNEL, FilePlace()))

    def close(self) -> None:
        """Everything was read when it was made."""

    def go_to(self, place: FilePlace) -> None:
        self.line_place = place
        self._latest = place.at
        self._waiting = deque(line for line in self._lines if line[0] >= place.offset)

    @property
    def place(self) -> FilePlace:
        following = self._lines[-1][0] + 1 if self._lines else self.line_place.offset
        return FilePlace(self._waiting[0][0] if self._waiting else following, False, self._latest)

    def _read(self) -> bool:
        return False

    def _awaited(self, reader: KernelReader) -> list[PlacedLine]:
        """What a reader has to wait for a moment; none where it has given everything."""
        number = reader.fileno()
        if number is None or len(self._lines) > _MOST_KERNEL_LINES:
            return []
        return reader.read() if select.select([number], [], [], _KERNEL_SECONDS)[0] else []
