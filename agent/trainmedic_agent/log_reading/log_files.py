"""Reading of a log file that grows, is truncated, or renamed.

A file is known by its inode, and by its bytes: the first of it and the last before where reading goes on. Where those
are not what they were it was truncated, or another took its number, and it is read from its beginning as another file.

Not here: which files there are (``discovery``), and opening them (``log_opening``).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Mapping
from typing import Any, Self

from msgspec import Struct
from msgspec.structs import replace

from trainmedic_agent.log_opening.own_files import OwnFiles
from trainmedic_agent.log_reading.budgets import NODE_ITSELF, BudgetOwner
from trainmedic_agent.log_reading.line_cutter import MOST_KEPT, LineCutter, PlacedLine
from trainmedic_logs.domain import file_times

LARGEST_READ = 64 * 1024
"""Bytes that are read of a file at a time, so that each has its turn."""
FARTHEST_BEHIND = 64 * 1024 * 1024
"""Bytes. Who is further behind goes on at the last `_KEPT_BEHIND`, unless every line counts."""
_KEPT_BEHIND = 16 * 1024 * 1024
_HEAD_BYTES = 256
_TAIL_BYTES = 64

OpenLog = Callable[[str], int]
"""Returns a descriptor of the regular file at a path. Raises OSError, LogRefused."""


class FilePosition(Struct, frozen=True):
    """How far a file was read: what is written down, and is found again after a restart."""

    path: str
    """By which it was found; it names the file also when it is renamed."""
    device: int
    inode: int
    since: int
    """When the agent met it, or saw it truncated: microseconds since 1970."""
    offset: int = 0
    is_skipping: bool = False
    """What comes next is the rest of a line whose beginning was given out."""
    head: bytes = b""
    """The first bytes of the file, at most 256."""
    tail: bytes = b""
    """The last bytes before `offset`, at most 64."""
    written_ns: int = 0
    """When the file was last written, as far as it was read: nanoseconds since 1970."""

    @property
    def generation(self) -> str:
        """What tells its lines from those of other files by this path."""
        return f"{self.inode}-{self.since}"

    def to_json(self) -> dict[str, Any]:
        return {
            "path": os.fsencode(self.path).decode("latin-1"),
            "device": self.device,
            "inode": self.inode,
            "since": self.since,
            "offset": self.offset,
            "skipping": self.is_skipping,
            "head": self.head.hex(),
            "tail": self.tail.hex(),
            "written": self.written_ns,
        }

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Self:
        """Raises KeyError, TypeError, ValueError where this is no position."""
        return cls(
            path=os.fsdecode(values["path"].encode("latin-1")),
            device=int(values["device"]),
            inode=int(values["inode"]),
            since=int(values["since"]),
            offset=int(values["offset"]),
            is_skipping=bool(values["skipping"]),
            head=bytes.fromhex(values["head"]),
            tail=bytes.fromhex(values["tail"]),
            written_ns=int(values["written"]),
        )


class ReadSizes(Struct, frozen=True):
    """How much is read at once, in bytes."""

    piece: int = LARGEST_READ
    longest: int = MOST_KEPT
    """Of a line; the rest of it is left out."""


class GrowingFile:
    """An open file, read from a position on. One thread uses it, and closes it."""

    def __init__(
        self, fd: int, position: FilePosition, *, is_whole: bool = False, sizes: ReadSizes = ReadSizes()
    ) -> None:
        """`is_whole`: every line counts, so nothing is left out however far behind reading is."""
        self.left_out = 0
        """Bytes of lines that are too long, and of what was too far ahead."""
        self.owner: BudgetOwner = NODE_ITSELF
        """Whose budget reading it uses."""
        self._fd = fd
        self._is_whole = is_whole
        self._sizes = sizes
        self._start = position
        self._cutter = self._cutter_at(position.offset, position.is_skipping)
        # What it was like when it was looked at last: its size, and when it was written.
        self._size = -1
        self._written_ns = -1

    @classmethod
    def open(
        cls,
        path: str,
        position: FilePosition,
        *,
        is_whole: bool = False,
        sizes: ReadSizes = ReadSizes(),
        open_log: OpenLog = OwnFiles().open,
    ) -> Self:
        """Open the file that is at `path` where it was left. Raises OSError, LogRefused; FileNotFoundError where
        another file than that of `position` is there."""
        fd = open_log(path)
        facts = os.fstat(fd)
        if facts.st_ino != position.inode:
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "another file has taken its place", path)
        return cls(fd, replace(position, device=facts.st_dev), is_whole=is_whole, sizes=sizes)

    def close(self) -> None:
        os.close(self._fd)

    def look(self) -> bool:
        """See whether there is something new; return False where the file is not what it was: it was truncated.

        Raises OSError.
        """
        facts = os.fstat(self._fd)
        if (facts.st_size, file_times.written_ns(facts)) == (self._size, self._written_ns):
            return True
        if not self._is_same(facts.st_size):
            return False
        self._size, self._written_ns = facts.st_size, file_times.written_ns(facts)
        return True

    def read(self) -> list[PlacedLine]:
        """The lines of the next piece. Raises OSError."""
        behind = self._size - self._cutter.offset
        if behind > FARTHEST_BEHIND and not self._is_whole:
            self.start_at(self._size - _KEPT_BEHIND)
        piece = os.pread(self._fd, self._sizes.piece, self._cutter.offset) if behind > 0 else b""
        if not piece:
            self._size = min(self._size, self._cutter.offset)
            return []
        if len(self._start.head) < _HEAD_BYTES:
            known = min(_HEAD_BYTES, self._cutter.offset + len(piece))
            self._start = replace(self._start, head=os.pread(self._fd, known, 0))
        before = self._cutter.left_out
        lines = self._cutter.feed(piece)
        self.left_out += self._cutter.left_out - before
        self._start = self.position(None)
        return lines

    def half_line(self) -> list[PlacedLine]:
        """Give out a line whose end does not come."""
        return self._cutter.half_line()

    def begin_anew(self, now: int) -> None:
        """Read it from its beginning, as another file by the same path: it was truncated. `now` in microseconds.

        Raises OSError.

        Who writes on at the old place after a truncation leaves a hole, which is not read.
        """
        begin = 0
        with contextlib.suppress(OSError):  # the file system knows no holes, or all of it is one
            begin = os.lseek(self._fd, 0, os.SEEK_DATA)
        start = self._start
        self._start = FilePosition(start.path, start.device, start.inode, max(now, start.since + 1), begin)
        self._cutter = self._cutter_at(begin)
        self._size = self._written_ns = -1

    def start_at(self, offset: int) -> None:
        """Go on at the first line that begins after `offset`; what is left out counts as lost."""
        if offset > self._cutter.offset:
            self.left_out += offset - self._cutter.offset
            self._cutter = self._cutter_at(offset, is_skipping=True)

    @property
    def offset(self) -> int:
        """Bytes that were read."""
        return self._cutter.offset

    @property
    def has_more(self) -> bool:
        """Whether more was there at the last look than has been read."""
        return self._cutter.offset < self._size

    @property
    def waiting(self) -> int:
        """Bytes that the next `read` takes. 0 if the file cannot be looked at."""
        try:
            return min(max(os.fstat(self._fd).st_size - self._cutter.offset, 0), self._sizes.piece)
        except OSError:
            return 0

    @property
    def size(self) -> int:
        """Bytes that were in it at the last look."""
        return max(self._size, 0)

    @property
    def has_half_line(self) -> bool:
        return self._cutter.has_half_line

    @property
    def names(self) -> int:
        """How many names the file has: 0 where it was deleted. Raises OSError."""
        return os.fstat(self._fd).st_nlink

    @property
    def written_at(self) -> float:
        """Unix time, when it was looked at last."""
        return self._written_ns / 1e9

    @property
    def written_ns(self) -> int:
        """The same in nanoseconds. 0 if it was not read."""
        return max(self._written_ns, 0)

    def position(self, oldest: int | None) -> FilePosition:
        """Where reading goes on: at `oldest`, where a line begins, or behind what was given out. Raises OSError."""
        offset = self._cutter.resume_at if oldest is None else oldest
        tail = os.pread(self._fd, min(_TAIL_BYTES, offset), max(offset - _TAIL_BYTES, 0))
        return replace(
            self._start,
            offset=offset,
            is_skipping=oldest is None and self._cutter.is_skipping,
            tail=tail,
            written_ns=self.written_ns,
        )

    def around(self, place: int, most: int) -> tuple[bytes, bytes]:
        """The bytes before a place, and those from it on, so many at most of each. Raises OSError."""
        begin = max(place - most, 0)
        raw = os.pread(self._fd, place - begin + most, begin)
        return raw[: place - begin], raw[place - begin :]

    def _cutter_at(self, offset: int, is_skipping: bool = False) -> LineCutter:
        return LineCutter(offset, is_skipping, self._sizes.longest)

    def _is_same(self, size: int) -> bool:
        """Whether what was read of the file is still in it."""
        start = self._start
        if size < self._cutter.offset:
            return False
        tail = os.pread(self._fd, len(start.tail), start.offset - len(start.tail))
        head = os.pread(self._fd, len(start.head), 0)
        # A log that was shrunk has a hole for its beginning, and its end as it was.
        is_shrunk = not head.strip(b"\0") and bool(tail.strip(b"\0"))
        return tail == start.tail and (head == start.head or is_shrunk)
