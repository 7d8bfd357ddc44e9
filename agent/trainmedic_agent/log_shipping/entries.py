"""Lines as store entries with unique times, labels and masked secrets.

A store merges lines with the same time and text, so each line of a file gets its own nanosecond, the same after a kill.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct

from trainmedic_agent.log_reading.line_cutter import PlacedLine
from trainmedic_agent.log_shipping.ship_counters import LostReason
from trainmedic_logs.domain.finding import Origin
from trainmedic_logs.domain.log_search import TimeKnownBy
from trainmedic_logs.lines import line_times
from trainmedic_logs.lines.parsed_line import LineMask, ParsedLine, parse

LONGEST_LINE = 64 * 1024  # bytes shipped; Loki's limit is 256 KiB
LONGEST_LABEL = 1024  # characters of a value; Loki's limit is 2,048
_FUTURE = timedelta(minutes=1)  # a time further ahead is wrong; Loki's limit is 10 min
# A line without a timestamp gets the last line's time if it arrived less than this after that time.
_SAME_TIME = timedelta(seconds=2)
_NEAR_ARRIVAL = timedelta(minutes=15)  # a time without a certain zone counts if this close before the arrival
# Nanoseconds: each file adds its own offset below this, so that equal lines of ranks do not collide.
_FILE_OFFSETS = 500
_MILLISECOND = 1_000_000  # in nanoseconds
_EPOCH = datetime.fromisoformat("1970-01-01T00:00:00+00:00")
_MOST_TIMES = 16  # remembered and stored per file
_MOST_ARRIVALS = 600  # per file; even, see `Arrivals.record`

Labels = tuple[tuple[str, str], ...]


class StoreEntry(Struct, frozen=True):
    at: int
    """Nanoseconds since 1970."""
    time: int  # `at` before it was made unique
    labels: Labels
    metadata: Mapping[str, str]
    text: str
    source: str
    place: int  # offset from which to read again
    turn: int = 0  # number of truncations before it
    lost: LostReason | None = None  # why it is not sent, if so

    @property
    def size(self) -> int:
        return len(self.text) + 100  # about what JSON and labels add


class UniqueTimes:
    """Nanoseconds of a log's entries."""

    def __init__(self, kept: Mapping[str, Any]) -> None:
        self.last = int(kept.get("at", 0))
        self._used: dict[int, int] = {int(time): int(at) for time, at in kept.get("times", ())}  # last one by time

    def next(self, time: int) -> int:
        is_same = self.last - _MILLISECOND < time <= self.last
        # A time that comes again after another one continues where it was.
        at = max(self.last + 1 if is_same else time, self._used.get(time, 0) + 1)
        self.use(time, at)
        return at

    def use(self, time: int, at: int) -> None:
        self.last = at
        self._used.pop(time, None)
        self._used[time] = at
        if len(self._used) > _MOST_TIMES:
            del self._used[next(iter(self._used))]

    def to_json(self) -> Mapping[str, Any]:
        return {"at": self.last, "times": list(self._used.items())}


class EntryMaker:
    def __init__(self, origin: Origin, booted_at: datetime, oldest: timedelta, times: UniqueTimes) -> None:
        self.skips_ranks = False  # True if the ranks have their own files
        self._booted_at = booted_at
        self._oldest = oldest
        self._times = times
        # Time of the last line, before it was made unique.
        self._latest = _EPOCH + timedelta(microseconds=times.last // 1000) if times.last else None
        self._mask = LineMask()
        self._key_place = 0  # place of the last line that began outside a private key
        self.set_origin(origin)

    def set_origin(self, origin: Origin) -> None:
        self.origin = origin
        # By inode, which is the same after a kill.
        self._file_offset = zlib.crc32(origin.generation.partition("-")[0].encode()) % _FILE_OFFSETS
        labels = {"job": origin.job, "node": origin.node, "source": origin.source}
        self._labels = tuple((name, value[:LONGEST_LABEL]) for name, value in labels.items() if value)
        numbers = {"attempt": origin.attempt, "node_rank": origin.node_rank, "local_rank": origin.local_rank}
        self._metadata = {name: str(value) for name, value in numbers.items() if value is not None}
        if origin.pod is not None:
            self._metadata["pod"] = origin.pod

    @property
    def key_place(self) -> int | None:
        """Start of an unfinished private key; None outside one."""
        return self._key_place if self._mask.is_in_key else None

    def entry(self, placed: PlacedLine, arrived: datetime, now: datetime, turn: int = 0) -> StoreEntry | None:
        """Return None for an empty or skipped line."""
        place, raw = placed
        line = parse(raw, self.origin.source, self._booted_at, LONGEST_LINE)
        if line is None or not line.text.strip() or (self.skips_ranks and line.local_rank is not None):
            return None
        key_place = self.key_place
        text = self._mask.of(line.text)
        if key_place is None:
            self._key_place = place
        stated, known_by = _stated(line, arrived)
        time = (self._time_of(stated, arrived) - _EPOCH) // timedelta(microseconds=1) * 1000 + self._file_offset
        return StoreEntry(
            at=self._times.next(time),
            time=time,
            labels=(*self._labels, ("level", line.level.value)),
            metadata=self._metadata_of(line, known_by),
            text=text,
            source=self.origin.source,
            place=place if key_place is None else key_place,
            turn=turn,
            lost=LostReason.TOO_OLD if self._latest is not None and now - self._latest > self._oldest else None,
        )

    def _metadata_of(self, line: ParsedLine, known_by: TimeKnownBy) -> Mapping[str, str]:
        rank = line.rank if line.rank is not None else self.origin.rank
        added = {"rank": rank, "local_rank": line.local_rank}
        members = {name: str(value) for name, value in added.items() if value is not None}
        if known_by is not TimeKnownBy.LINE:
            members["time_source"] = known_by.value
        return {**self._metadata, **members} if members else self._metadata

    def _time_of(self, stated: datetime | None, arrived: datetime) -> datetime:
        if stated is not None:
            self._latest = stated
        elif self._latest is None or not -_FUTURE <= arrived - self._latest < _SAME_TIME:
            self._latest = arrived
        return self._latest


def _stated(line: ParsedLine, arrived: datetime) -> tuple[datetime | None, TimeKnownBy]:
    """Return the line's own time, and how it is known; None if the arrival counts."""
    if line.at is not None and line.at <= arrived + _FUTURE:
        return line.at, TimeKnownBy.LINE
    at = line_times.moment(line.stated, None, arrived, arrived) if line.stated is not None else None
    if at is None or line.stated is None or not arrived - _NEAR_ARRIVAL < at <= arrived + _FUTURE:
        return None, TimeKnownBy.ARRIVAL
    return at, TimeKnownBy.LINE if line.stated.has_zone else TimeKnownBy.NODE_ZONE


class ShippedLines(ABC):
    """A log's lines as entries. Reading resumes at the oldest one not accepted.

    Not thread-safe.
    """

    origin: Origin
    _raw: deque[Any]  # lines that were read

    def __init__(self, kept: Mapping[str, Any]) -> None:
        """`kept`: an earlier process's `state`."""
        self.is_failing = False  # the last read raised OSError
        self._confirmed = UniqueTimes(kept)
        self._head: StoreEntry | None = None
        self._unsent: deque[StoreEntry] = deque()  # taken by `pop_head`, and not confirmed

    @property
    @abstractmethod
    def key(self) -> str:
        """Key of the stored position."""

    @abstractmethod
    def place_json(self) -> Mapping[str, Any]:
        """Return the place to resume reading after a restart. Raises OSError."""

    @abstractmethod
    def _read(self) -> bool:
        """Add lines to `_raw`; return whether there are any. Raises OSError."""

    @abstractmethod
    def _next_entry(self) -> StoreEntry | None:
        """Remove the next of `_raw`; None if it is not shipped."""

    def state(self) -> Mapping[str, Any]:
        return self._confirmed.to_json()

    def head(self) -> StoreEntry | None:
        """Return the next entry without removing it, if any. Raises OSError."""
        while self._head is None and (self._raw or self._read()):
            self._head = self._next_entry()
        return self._head

    def pop_head(self) -> None:
        """Remove the next entry, which stays unsent until `confirm_oldest`."""
        assert self._head is not None
        self._unsent.append(self._head)
        self._head = None

    def confirm_oldest(self) -> None:
        """Record that the store has the oldest unsent entry, or never will."""
        entry = self._unsent.popleft()
        self._confirmed.use(entry.time, entry.at)


# Of one shipped file, in memory. `log_reading.arrivals` has the stored ones.
class Arrivals:
    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._times: list[datetime] = []

    def record(self, size: int, now: datetime) -> None:
        if self._sizes and size <= self._sizes[-1]:
            return
        self._sizes.append(size)
        self._times.append(now)
        if len(self._sizes) > _MOST_ARRIVALS:  # keep the later of two, the last among them
            self._sizes, self._times = self._sizes[::2], self._times[::2]

    def of(self, place: int, now: datetime) -> datetime:
        """Return when the byte at `place` had arrived; forget earlier bytes."""
        at = bisect_right(self._sizes, place)
        if at > 0:
            del self._sizes[:at], self._times[:at]
        return self._times[0] if self._times else now

    def forget(self) -> None:
        self._sizes, self._times = [], []
