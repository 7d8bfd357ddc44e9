"""Reading of a log file that grows, is truncated or renamed.

A file is identified by its inode, first bytes, and the last bytes before the read position.
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

LARGEST_READ = 64 * 1024  # bytes read at a time
# Unread bytes beyond which reading skips to the last `_KEPT_BEHIND`, unless every line counts.
FARTHEST_BEHIND = 64 * 1024 * 1024
_KEPT_BEHIND = 16 * 1024 * 1024
_HEAD_BYTES = 256
_TAIL_BYTES = 64

OpenLog = Callable[[str], int]  # returns the descriptor of the regular file at a path. Raises OSError, LogRefused.


class FilePosition(Struct, frozen=True):
    """Place up to which a file was processed, with marks that identify it."""

    path: str
    """Path when found, despite renames."""
    device: int
    inode: int
    since: int
    """Microseconds since 1970 of discovery or truncation."""
    offset: int = 0
    is_skipping: bool = False
    """As in `LineCutter`."""
    head: bytes = b""
    """The file's first bytes, at most 256."""
    tail: bytes = b""
    """Last bytes before `offset`, at most 64."""
    written_ns: int = 0
    """Last write seen, in nanoseconds since 1970."""

    @property
    def generation(self) -> str:
        """Distinguishes its lines from other files' with this path."""
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
        """Raises KeyError, TypeError, ValueError, AttributeError."""
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
    """Bytes per read and of the longest line."""

    piece: int = LARGEST_READ
    longest: int = MOST_KEPT


class GrowingFile:
    """Not thread-safe."""

    def __init__(
        self, fd: int, position: FilePosition, *, is_whole: bool = False, sizes: ReadSizes = ReadSizes()
    ) -> None:
        """`is_whole`: nothing may be skipped."""
        self.left_out = 0  # skipped bytes, and those of overlong lines
        self.owner: BudgetOwner = NODE_ITSELF
        self._fd = fd
        self._is_whole = is_whole
        self._sizes = sizes
        self._known_position = position
        self._tail = position.tail  # last bytes read, at most 64, kept from the read itself: the file may change after
        self._cutter = self._cutter_at(position.offset, position.is_skipping)
        # Size and last write at the last look, -1 before it.
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
        """Open the file at its position.

        Raises OSError, LogRefused; FileNotFoundError if another file is at `path`.
        """
        fd = open_log(path)
        facts = os.fstat(fd)
        if facts.st_ino != position.inode:
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "another file has taken its place", path)
        return cls(fd, replace(position, device=facts.st_dev), is_whole=is_whole, sizes=sizes)

    def close(self) -> None:
        os.close(self._fd)

    def look(self) -> bool:
        """Check for new data; False if the file was truncated or replaced. Raises OSError."""
        facts = os.fstat(self._fd)
        if (facts.st_size, file_times.written_ns(facts)) == (self._size, self._written_ns):
            return True
        if not self._is_same_file(facts.st_size):
            return False
        self._size, self._written_ns = facts.st_size, file_times.written_ns(facts)
        return True

    def read(self) -> list[PlacedLine]:
        """Return the lines of the next piece, after `look`. Raises OSError."""
        behind = self._size - self._cutter.offset
        if behind > FARTHEST_BEHIND and not self._is_whole:
            self.start_at(self._size - _KEPT_BEHIND)
        offset = self._cutter.offset
        piece = os.pread(self._fd, self._sizes.piece, offset) if behind > 0 else b""
        if not piece:
            self._size = min(self._size, offset)
            return []
        head = self._known_position.head
        if len(head) < _HEAD_BYTES:
            is_next = offset == len(head)
            head = (head + piece)[:_HEAD_BYTES] if is_next else os.pread(self._fd, min(_HEAD_BYTES, offset), 0)
            self._known_position = replace(self._known_position, head=head)
        self._tail = (self._tail + piece)[-_TAIL_BYTES:]
        before = self._cutter.left_out
        lines = self._cutter.feed(piece)
        self.left_out += self._cutter.left_out - before
        return lines

    def take_unfinished_line(self) -> list[PlacedLine]:
        return self._cutter.take_unfinished_line()

    def restart(self, now: int) -> None:
        """Read a truncated file as a new one. `now` in microseconds. Raises OSError.

        A writer that continues at its old offset leaves a hole, which is skipped.
        """
        begin = 0
        with contextlib.suppress(OSError):  # no support for holes, or only a hole
            begin = os.lseek(self._fd, 0, os.SEEK_DATA)
        start = self._known_position
        self._known_position = FilePosition(start.path, start.device, start.inode, max(now, start.since + 1), begin)
        self._cutter, self._tail = self._cutter_at(begin), b""
        self._size = self._written_ns = -1

    def start_at(self, offset: int) -> None:
        """Continue at the first line after `offset`, counting skipped bytes as dropped."""
        if offset > self._cutter.offset:
            self.left_out += offset - self._cutter.offset
            self._cutter, self._tail = self._cutter_at(offset, is_skipping=True), b""

    @property
    def offset(self) -> int:
        return self._cutter.offset

    @property
    def has_more(self) -> bool:
        return self._cutter.offset < self._size

    @property
    def next_read_bytes(self) -> int:
        """0 if unknown."""
        try:
            return min(max(os.fstat(self._fd).st_size - self._cutter.offset, 0), self._sizes.piece)
        except OSError:
            return 0

    @property
    def size(self) -> int:
        """Size at the last look, 0 before it."""
        return max(self._size, 0)

    @property
    def has_unfinished_line(self) -> bool:
        return self._cutter.has_unfinished_line

    @property
    def link_count(self) -> int:
        """0 if deleted. Raises OSError."""
        return os.fstat(self._fd).st_nlink

    @property
    def written_at(self) -> float:
        """Last write at the last look, in Unix time."""
        return self._written_ns / 1e9

    @property
    def written_ns(self) -> int:
        """The same in nanoseconds, 0 before it."""
        return max(self._written_ns, 0)

    def position(self, oldest: int | None) -> FilePosition:
        """Return the position to resume at: `oldest`, or after the returned lines. Raises OSError."""
        offset = self._cutter.resume_at if oldest is None else oldest
        tail = os.pread(self._fd, min(_TAIL_BYTES, offset), max(offset - _TAIL_BYTES, 0))
        return replace(
            self._known_position,
            offset=offset,
            is_skipping=oldest is None and self._cutter.is_skipping,
            tail=tail,
            written_ns=self.written_ns,
        )

    def around(self, offset: int, most: int) -> tuple[bytes, bytes]:
        """Return up to `most` bytes before `offset`, and from it on. Raises OSError."""
        begin = max(offset - most, 0)
        raw = os.pread(self._fd, offset - begin + most, begin)
        return raw[: offset - begin], raw[offset - begin :]

    def _cutter_at(self, offset: int, is_skipping: bool = False) -> LineCutter:
        return LineCutter(offset, is_skipping, self._sizes.longest)

    def _is_same_file(self, size: int) -> bool:
        offset, known_head = self._cutter.offset, self._known_position.head
        if size < offset:
            return False
        tail = os.pread(self._fd, len(self._tail), offset - len(self._tail))
        head = os.pread(self._fd, len(known_head), 0)
        # Freeing a log's beginning leaves zeros there, and the rest in place.
        is_beginning_freed = not head.strip(b"\0") and bool(tail.strip(b"\0"))
        return tail == self._tail and (head == known_head or is_beginning_freed)
