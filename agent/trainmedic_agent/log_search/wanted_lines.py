"""Matching lines of one stream, with times.

Secrets are masked first, so that no query can find them.
"""

from __future__ import annotations

import re
import select
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import NamedTuple

from trainmedic_agent.log_reading.kernel_log import KernelReader
from trainmedic_agent.log_reading.line_cutter import LineCutter, PlacedLine
from trainmedic_agent.log_search.line_clock import BEGINNING, SLACK, LineClock
from trainmedic_agent.log_search.line_filter import Answers, LineFilter
from trainmedic_logs.domain.finding import Origin
from trainmedic_logs.domain.log_search import TIME, FoundLine, LeftOut
from trainmedic_logs.lines import kernel_text, line_times, prefixes, raw_text, times
from trainmedic_logs.lines.line_times import Stated
from trainmedic_logs.lines.parsed_line import LineMask, parse
from trainmedic_logs.lines.records import record_of

# A cheap test: other lines state no time, and need no parsing.
_MAY_STATE = re.compile(rb"\d\d:\d\d:\d\d|\d{10}|\d{8}[T_-]\d{6}")
_MOST_SEARCHED = 1024  # bytes of a line in which a time may be
KERNEL = "kernel"
_WAIT_SECONDS = 0.5  # wait for the journal's next lines
_MOST_KERNEL_LINES = 200_000  # with more, no wait for further ones
PROBED_LINES = 256  # lines ahead, searched for the next time


class ReadBudget:
    """Bytes and time for one answer; `is_stopping` ends it."""

    def __init__(self, most_bytes: int, seconds: float, is_stopping: Callable[[], bool] = lambda: False) -> None:
        self._is_stopping = is_stopping
        self._left = most_bytes
        self._seconds = seconds
        self._until = time.monotonic() + seconds

    def restart_time(self) -> None:
        self._until = time.monotonic() + self._seconds

    def take(self, count: int) -> None:
        self._left -= count

    @property
    def is_spent(self) -> bool:
        return self._left <= 0 or time.monotonic() > self._until or self._is_stopping()

    @property
    def is_stopped(self) -> bool:
        return self._is_stopping()


class FilePlace(NamedTuple):
    offset: int = 0
    is_skipping: bool = False  # as in `LineCutter`
    at: datetime = BEGINNING
    """Time of the last timed line before it."""
    mark: int = 0
    """Checksum of the bytes before it; 0 without one."""


class WantedLines(ABC):
    def __init__(self, key: str, origin: Origin, line_filter: LineFilter, clock: LineClock, budget: ReadBudget) -> None:
        self.key = key  # in `Places`
        self._budget = budget
        self.is_untimed = False  # True if no line near the window states a time
        self.skips_ranks = False  # True for a launcher's log if its ranks have their own files
        self.has_more = False  # True if lines were left when the budget was spent
        self.line_place = FilePlace()  # place before the last returned line
        self.clock = clock
        self._origin = origin
        self._wanted = line_filter
        self._booted_at = datetime.fromtimestamp(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME), UTC)
        self._mask = LineMask()
        self._waiting: deque[PlacedLine] = deque()
        # A place, and the next stated time of lines before it, None if none is near.
        self._following: tuple[int, datetime | None] = (-1, None)
        self._left_out: Counter[str] = Counter()
        self._left_out_since: datetime | None = None

    @property
    @abstractmethod
    def place(self) -> FilePlace:
        """Place after the last returned or skipped line."""

    @abstractmethod
    def go_to(self, place: FilePlace) -> None: ...

    @abstractmethod
    def _queue_lines(self) -> bool:
        """Queue more lines, and set `has_more`; False without any or without budget. Raises OSError."""

    def marked(self, place: FilePlace) -> FilePlace:
        """Return the place with its mark, if files of this kind have marks."""
        return place

    @property
    def left_out(self) -> dict[str, LeftOut]:
        """Excluded lines, by the requested attribute that is unknown."""
        since = {TIME: self._left_out_since}
        return {name: LeftOut(0, count, since.get(name)) for name, count in self._left_out.items()}

    def next(self) -> FoundLine | None:
        """Return the next match; None at the end or without budget. Raises OSError."""
        until = self._wanted.query.until
        while not self._budget.is_stopped:
            if not self._waiting and not self._queue_lines():
                return None
            if until is not None and self.clock.latest >= until + SLACK:
                self.has_more = False
                return None
            before = self.place
            offset, raw = self._waiting.popleft()
            line = self._match(offset, raw)
            if line is not None:
                self.line_place = before
                return line
        return None

    def _match(self, offset: int, raw: bytes) -> FoundLine | None:
        origin, end = self._origin, offset + len(raw)
        line = parse(raw, origin.source, self._booted_at)
        if line is None or (self.skips_ranks and line.local_rank is not None):
            return None
        if not line.text and raw and not raw.strip(b"\0"):
            return None  # only NUL bytes: the rest of a hole in the file
        stated = self.clock.stated_at(end, line.at, line.stated)
        if stated is not None:
            moment = self.clock.time_stated(*stated)
        else:
            moment = self.clock.time_without(end, self._next_stated(offset))
        if self._wanted.is_excluded(line.level, moment):
            self._mask.skip(line.text)  # masking each line would take most of the time
            return None
        shown = FoundLine(
            moment.at,
            self._mask.of(line.text),
            origin.node,
            origin.source,
            line.level,
            origin.job,
            origin.attempt,
            line.rank if line.rank is not None else origin.rank,
            line.local_rank if line.local_rank is not None else origin.local_rank,
            moment.known_by,
            round(moment.error, 3) if moment.error is not None else None,
        )
        answer, missing = self._wanted.answer(shown, moment)
        if answer is Answers.UNKNOWN:
            self._left_out[missing] += 1
            if missing == TIME and moment.earliest is not None:
                since = self._left_out_since
                self._left_out_since = moment.earliest if since is None else min(since, moment.earliest)
        return shown if answer is Answers.YES else None

    def _next_stated(self, offset: int) -> datetime | None:
        """Return the next stated time, if near. Raises OSError."""
        until, at = self._following
        if offset < until:
            return at
        while len(self._waiting) < PROBED_LINES and self._queue_lines():
            continue
        place = offset
        for number, (place, raw) in enumerate(islice(self._waiting, PROBED_LINES)):
            stated = self._stated_by(place, raw)
            if stated is not None:
                self._following = (place, stated)
                return stated
            if number == PROBED_LINES // 2:
                # Lines up to here need no further look: their next time is not near.
                self._following = (place, None)
        if self._following[0] <= offset:
            self._following = (place, None)
        return None

    def _stated_by(self, offset: int, raw: bytes) -> datetime | None:
        at, uncertain = self._times_in(raw)
        stated = self.clock.stated_at(offset + len(raw), at, uncertain)
        return stated[0] if stated is not None else None

    def _times_in(self, raw: bytes) -> tuple[datetime | None, Stated | None]:
        """Return the line's time; else one without date or zone."""
        if self._origin.source != "kernel" and not _may_state(raw):
            return None, None
        text, _ = raw_text.text_of(raw)
        if self._origin.source == "kernel":
            at = kernel_text.split(text, self._booted_at).at
            return at, line_times.stated(text) if at is None else None
        prefixed = prefixes.split(text, self._origin.source)
        if self.skips_ranks and prefixed.local_rank is not None:
            return None, None
        at = prefixed.at or times.stated_by(prefixed.text, record_of(prefixed.text))
        return at, line_times.stated(prefixed.text) if at is None else None

    def _preselected(self, lines: list[PlacedLine]) -> Sequence[PlacedLine]:
        """Return lines that may match, with the timed ones that they need."""
        likely = self._wanted.likely
        if likely is None or self._mask.is_in_key or self._origin.source == "kernel":
            return lines
        together = b"\n".join(raw for _, raw in lines)
        if _MAY_STATE.search(together) is None and b"\0" not in together:
            return likely.among(lines, lambda _: False)  # no line has a timestamp
        return likely.among(lines, lambda placed: self._stated_by(*placed) is not None)


class KernelLines(WantedLines):
    """Lines of this boot, with the places of `kernel_log`."""

    def __init__(
        self,
        reader: KernelReader,
        origin: Origin,
        places: Mapping[str, FilePlace],
        line_filter: LineFilter,
        budget: ReadBudget,
    ) -> None:
        """Read all lines. Raises OSError."""
        super().__init__(KERNEL, origin, line_filter, LineClock(datetime.now(UTC)), budget)
        self._lines: list[PlacedLine] = []
        while not budget.is_stopped and (more := reader.read() or self._wait_and_read(reader)):
            self._lines += more
        self.go_to(places.get(KERNEL, FilePlace()))

    def go_to(self, place: FilePlace) -> None:
        self.line_place = place
        self.clock.before = place.at
        self._following = (-1, None)
        self._waiting = deque(line for line in self._lines if line[0] >= place.offset)

    @property
    def place(self) -> FilePlace:
        following = self._lines[-1][0] + 1 if self._lines else self.line_place.offset
        return FilePlace(self._waiting[0][0] if self._waiting else following, False, self.clock.before)

    def _queue_lines(self) -> bool:
        return False

    def _wait_and_read(self, reader: KernelReader) -> list[PlacedLine]:
        """Wait briefly: a journal's process writes with pauses."""
        number = reader.fileno()
        if number is None or len(self._lines) > _MOST_KERNEL_LINES:
            return []
        poll = select.poll()  # select(2) takes no descriptor above 1023, of which a reader may have many
        poll.register(number, select.POLLIN)
        return reader.read() if poll.poll(_WAIT_SECONDS * 1000) else []


class LinesOfFile(WantedLines):
    """Lines of a file, which the caller opens and closes."""

    _fd: int
    _cutter: LineCutter
    is_whole: bool  # True if a last line without line feed is complete

    @property
    @abstractmethod
    def _has_unread(self) -> bool:
        """Whether there is more to read."""

    @abstractmethod
    def _next_piece(self) -> bytes:
        """Read on at the cutter. Raises OSError."""

    def _queue_lines(self) -> bool:
        read = len(self._waiting)
        while len(self._waiting) == read:
            if self._budget.is_spent:
                self.has_more = self._has_unread
                return False
            piece = self._next_piece()
            self._budget.take(len(piece))
            if piece:
                self._waiting.extend(self._preselected(self._cutter.feed(piece)))
            elif self.is_whole and self._cutter.has_unfinished_line:
                self._waiting.extend(self._cutter.take_unfinished_line())
            else:
                self.has_more = False
                return False
        return True

    def go_to(self, place: FilePlace) -> None:
        self.line_place = place
        self.clock.before = place.at
        self._waiting.clear()
        self._following = (-1, None)
        self._cutter = LineCutter(place.offset, place.is_skipping)

    @property
    def place(self) -> FilePlace:
        if self._waiting:
            return FilePlace(self._waiting[0][0], False, self.clock.before)
        return FilePlace(self._cutter.resume_at, self._cutter.is_skipping, self.clock.before)


def _may_state(raw: bytes) -> bool:
    # A JSON member, and what follows a carriage return, may be anywhere. Lines in UTF-16 have NUL bytes.
    is_whole = raw.startswith(b"{") or b"\r" in raw
    return _MAY_STATE.search(raw if is_whole else raw[:_MOST_SEARCHED]) is not None or b"\0" in raw[:_MOST_SEARCHED]
