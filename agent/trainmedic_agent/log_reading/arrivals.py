"""Arrival times of log bytes, for lines without a timestamp.

Each look at a grown file records a *block*: the new size, the last write, and the time of the previous look. Neighbours
are merged so that a block's duration stays roughly proportional to its age.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct, field

from trainmedic_agent.database import AgentDatabase
from trainmedic_agent.errors import JournalUnavailable
from trainmedic_agent.log_reading.job_look import OLD_SECONDS
from trainmedic_agent.log_reading.scan_units import FileKey, FoundFile

log = logging.getLogger(__name__)

_TABLES = (
    """CREATE TABLE log_arrivals (
        device INTEGER NOT NULL, inode INTEGER NOT NULL, begin INTEGER NOT NULL, size INTEGER NOT NULL,
        began INTEGER NOT NULL, at INTEGER NOT NULL, blocks BLOB NOT NULL, PRIMARY KEY (device, inode, begin)
    ) WITHOUT ROWID""",
    "CREATE INDEX log_arrivals_at ON log_arrivals (at)",
)
_RESOLUTION = 1000  # milliseconds merged into one block
_BLOCKS_OF_CHUNK = 256  # a chunk is a row of the table
MOST_CHUNKS = 400  # per file: a hundred thousand blocks of about 4 bytes
_MOST_ROWS = 40_000  # about 40 MB
_MOST_FILES = 100_000  # files in memory: users can create any number
_STORE_SECONDS = 5.0  # between writes to the database
_KEPT_MILLISECONDS = 40 * 24 * 3600 * 1000  # retention of an idle file's times
_NEW_SECONDS = 24 * 3600.0  # files not written for so long get no entry
_STALE_MILLISECONDS = 150_000  # greatest age of what a scan reports of an old file, which it rarely looks at
_UNKNOWN = 0  # a time that is not known
_NO_SPAN = 2**64 - 1  # stored in place of a block's duration if its earliest arrival is unknown
_ENDLESS = 2**63  # beyond any file's size


class Block(NamedTuple):
    """Bytes that arrived between two looks. Times are in milliseconds since 1970."""

    size: int  # The file's size after them
    after: int
    """Earliest arrival, 0 if unknown."""
    at: int  # latest arrival


class Arrival(NamedTuple):
    after: datetime | None  # Earliest time. None if unknown.
    at: datetime
    """Latest time."""
    until: int = 0  # Bytes up to this offset arrived with it


class _Chunk(NamedTuple):
    """Successive blocks of a file, as stored in a row. Times are in milliseconds since 1970."""

    begin: int  # Offset of the first byte
    size: int  # the file's size after the last block
    began: int  # Base of the times in `raw`
    at: int  # latest arrival
    raw: bytes  # compressed differences between blocks

    @classmethod
    def of_blocks(cls, begin: int, began: int, blocks: Sequence[Block]) -> _Chunk:
        numbers = array("Q")
        size, at = begin, began
        for block in blocks:
            span = _NO_SPAN if block.after == _UNKNOWN else max(block.at - block.after, 0)
            numbers.extend((block.size - size, block.at - at, span))
            size, at = block.size, block.at
        return cls(begin, size, began, at, zlib.compress(numbers.tobytes(), 1))

    def blocks(self) -> list[Block]:
        numbers = array("Q")
        numbers.frombytes(zlib.decompress(self.raw))
        size, at, blocks = self.begin, self.began, []
        for number in range(0, len(numbers), 3):
            size, at, span = size + numbers[number], at + numbers[number + 1], numbers[number + 2]
            blocks.append(Block(size, _UNKNOWN if span == _NO_SPAN else at - span, at))
        return blocks


class FileArrivals:
    def __init__(self, chunks: Sequence[_Chunk], last: Sequence[Block], looked_at: int) -> None:
        """`looked_at`: last look, in milliseconds since 1970."""
        self._chunks = list(chunks)
        self._sizes = [chunk.size for chunk in chunks]
        self._last = list(last)
        self._looked_at = looked_at
        self._decoded: tuple[int, list[Block]] = (-1, [])

    @property
    def size(self) -> int:
        """End of the bytes with known arrival."""
        return self._last[-1].size if self._last else self._size_of_chunks

    @property
    def _size_of_chunks(self) -> int:
        return self._sizes[-1] if self._sizes else 0

    @property
    def first_at(self) -> datetime | None:
        """Latest arrival of the first block, if any."""
        blocks = self._blocks(0) if self._chunks else self._last
        return datetime.fromtimestamp(blocks[0].at / 1000, UTC) if blocks else None

    def of(self, offset: int, now: datetime) -> Arrival:
        """Return the arrival of the byte at `offset`; of an unrecorded byte, from the last look to `now`."""
        block = self._block(offset)
        if block is None:
            after = datetime.fromtimestamp(self._looked_at / 1000, UTC)
            return Arrival(min(after, now), now, _ENDLESS)
        begin = None if block.after == _UNKNOWN else datetime.fromtimestamp(block.after / 1000, UTC)
        return Arrival(begin, datetime.fromtimestamp(block.at / 1000, UTC), block.size)

    def first_offset(self, since: datetime) -> int:
        """Return the offset before which no byte arrived at `since` or later."""
        wanted = int(since.timestamp() * 1000)
        chunk = bisect_left(self._chunks, wanted, key=lambda chunk: chunk.at)
        if chunk < len(self._chunks):
            blocks, begin = self._blocks(chunk), self._chunks[chunk].begin
        else:
            blocks, begin = self._last, self._size_of_chunks
        number = bisect_left(blocks, wanted, key=lambda block: block.at)
        if number == len(blocks):
            return self.size
        return blocks[number - 1].size if number else begin

    def _block(self, offset: int) -> Block | None:
        chunk = bisect_left(self._sizes, offset + 1)
        blocks = self._blocks(chunk) if chunk < len(self._chunks) else self._last
        number = bisect_left(blocks, offset + 1, key=lambda block: block.size)
        return blocks[number] if number < len(blocks) else None

    def _blocks(self, chunk: int) -> list[Block]:
        if self._decoded[0] != chunk:
            self._decoded = (chunk, self._chunks[chunk].blocks())
        return self._decoded[1]


class _FileState(Struct):
    """Times are in milliseconds since 1970."""

    size: int = 0
    at: int = _UNKNOWN
    """Latest arrival."""
    looked_at: int = _UNKNOWN
    begin: int = 0
    """Offset of the first of `blocks`."""
    began: int = _UNKNOWN  # as in `_Chunk`
    blocks: list[Block] = field(default_factory=list)  # since the last full chunk
    is_changed: bool = False


# The reading thread calls `record_look`, `forget` and `store_due` (also `LogReader.stop`), the scanning thread
# `record_scan`, searches `of`.
class ArrivalIndex:
    """Thread-safe."""

    def __init__(self, journal: AgentDatabase) -> None:
        """Raises JournalUnavailable."""
        journal.install("log_arrivals", [_TABLES])
        self._journal = journal
        self._lock = threading.Lock()
        self._files: dict[FileKey, _FileState] = {}
        for device, inode, size, at in journal.rows(
            "SELECT device, inode, MAX(size), MAX(at) FROM log_arrivals GROUP BY device, inode"
        ):
            self._files[_unsigned(device), _unsigned(inode)] = _FileState(size, at, at, size, at)
        # Full chunks, and forgotten files, that are not in the database yet.
        self._full: list[tuple[FileKey, _Chunk]] = []
        self._forgotten: list[FileKey] = []
        self._written_at = float("-inf")
        self._scanned_at = _UNKNOWN  # begin of the last scan, in milliseconds since 1970
        self._idle: set[FileKey] = set()  # files of the last scan without entry, because not written for so long

    def record_look(self, key: FileKey, size: int, written_ns: int, now: datetime) -> None:
        moment = _milliseconds(now)
        with self._lock:
            self._look(key, size, written_ns // 1_000_000, moment, moment)

    def record_scan(self, files: Iterable[FoundFile], began: datetime, ended: datetime) -> None:
        first, last = _milliseconds(began), _milliseconds(ended)
        idle_files: set[FileKey] = set()
        with self._lock:
            for file in files:
                key, written = (file.device, file.inode), file.written_ns // 1_000_000
                idle = last / 1000 - file.written_ns / 1e9
                if key not in self._files:
                    if idle > _NEW_SECONDS:
                        idle_files.add(key)
                        continue
                    # If the previous scan did not find this file, its content is newer.
                    is_new = _UNKNOWN < self._scanned_at <= written and key not in self._idle
                    self._files[key] = _FileState(looked_at=self._scanned_at if is_new else _UNKNOWN)
                # The scan rarely looks at jobs without a write for `OLD_SECONDS`, so their sizes may be out of date. A
                # file that was written within half of that time belongs to no such job.
                looked_at = first if idle < OLD_SECONDS / 2 else first - _STALE_MILLISECONDS
                self._look(key, file.size, written, looked_at, last)
            self._scanned_at, self._idle = first, idle_files
            if len(self._files) > _MOST_FILES:
                self._drop_longest_unseen(self._files)

    def forget(self, key: FileKey) -> None:
        with self._lock:
            self._forget(key)

    def of(self, key: FileKey, size: int) -> FileArrivals | None:
        """Return a file's arrivals. None if unknown, or recorded beyond its present `size`."""
        with self._lock:
            seen = self._files.get(key)
            if seen is None or seen.size > size:
                return None
            waiting = [chunk for of_file, chunk in self._full if of_file == key]
            last, looked_at, is_forgotten = list(seen.blocks), seen.looked_at, key in self._forgotten
        try:
            kept = [] if is_forgotten else self._stored_chunks(key)
        except JournalUnavailable as error:
            log.warning("cannot read arrival times of log lines", extra={"reason": str(error)})
            kept = []
        # Stored chunks from here on have newer versions in memory.
        newer_from = min((chunk.begin for chunk in waiting), default=seen.begin if last else size + 1)
        return FileArrivals([*(chunk for chunk in kept if chunk.begin < newer_from), *waiting], last, looked_at)

    def store_due(self, monotonic: float, *, is_last: bool = False) -> None:
        """Store changes, at most every 5 s. Failures are retried later."""
        if monotonic - self._written_at < _STORE_SECONDS and not is_last:
            return
        self._written_at = monotonic
        with self._lock:
            changed = {key: seen for key, seen in self._files.items() if seen.is_changed and seen.blocks}
            if not changed and not self._full and not self._forgotten:
                return
            open_chunks = [
                (key, _Chunk.of_blocks(seen.begin, seen.began, seen.blocks)) for key, seen in changed.items()
            ]
            full, forgotten, self._full, self._forgotten = self._full, self._forgotten, [], []
            for seen in changed.values():
                seen.is_changed = False
        try:
            self._write([*full, *open_chunks], forgotten, {key for key, _ in full})
        except JournalUnavailable as error:
            log.warning("cannot store arrival times of log lines", extra={"reason": str(error)})
            with self._lock:
                self._full, self._forgotten = full + self._full, forgotten + self._forgotten
                for seen in changed.values():
                    seen.is_changed = True

    def _drop_longest_unseen(self, files: dict[FileKey, _FileState]) -> None:
        for key in sorted(files, key=lambda key: files[key].looked_at)[: len(files) - _MOST_FILES // 2]:
            del files[key]

    def _look(self, key: FileKey, size: int, written: int, looked_at: int, now: int) -> None:
        seen = self._files.get(key)
        if seen is not None and size < seen.size:
            if looked_at <= seen.looked_at:
                return  # an earlier look than the one recorded
            self._forget(key)
            seen = None
        if seen is None:
            seen = self._files[key] = _FileState()
        if size > seen.size:
            # The last byte came with the last write, unless another process has set that time.
            at = written if max(seen.looked_at, 1) <= written <= now else now
            # The clock may have been set back since the last look.
            self._grow(key, seen, Block(size, seen.looked_at, max(at, seen.at, seen.looked_at)))
        seen.looked_at = max(seen.looked_at, looked_at)

    def _grow(self, key: FileKey, seen: _FileState, block: Block) -> None:
        last = seen.blocks[-1] if seen.blocks else None
        if last is not None and last.after != _UNKNOWN and block.at - last.after <= _RESOLUTION:
            seen.blocks[-1] = Block(block.size, last.after, block.at)
        else:
            if len(seen.blocks) >= _BLOCKS_OF_CHUNK:
                self._full.append((key, _Chunk.of_blocks(seen.begin, seen.began, seen.blocks)))
                seen.begin, seen.began, seen.blocks = seen.size, seen.at, []
            if seen.began == _UNKNOWN:
                seen.began = block.after or block.at
            seen.blocks.append(block)
        seen.size, seen.at, seen.is_changed = block.size, block.at, True

    def _forget(self, key: FileKey) -> None:
        if self._files.pop(key, None) is not None:
            self._full = [(of_file, chunk) for of_file, chunk in self._full if of_file != key]
            self._forgotten.append(key)

    def _stored_chunks(self, key: FileKey) -> list[_Chunk]:
        query = "SELECT begin, size, began, at, blocks FROM log_arrivals WHERE device = ? AND inode = ? ORDER BY begin"
        return [_Chunk(*row) for row in self._journal.rows(query, _signed(key))]

    def _write(
        self, chunks: Sequence[tuple[FileKey, _Chunk]], forgotten: Sequence[FileKey], grown: set[FileKey]
    ) -> None:
        with self._journal.transaction() as connection:
            connection.executemany(
                "DELETE FROM log_arrivals WHERE device = ? AND inode = ?", [_signed(key) for key in forgotten]
            )
            rows = [(*_signed(key), *chunk) for key, chunk in chunks]
            connection.executemany("INSERT OR REPLACE INTO log_arrivals VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            for key in grown:
                self._merge_chunks(connection, _signed(key))
            if grown or forgotten:
                self._make_room(connection)

    def _merge_chunks(self, connection: sqlite3.Connection, key: FileKey) -> None:
        of_file = "FROM log_arrivals WHERE device = ? AND inode = ?"
        ((count,),) = connection.execute(f"SELECT COUNT(*) {of_file}", key)
        if count <= MOST_CHUNKS:
            return
        kept = connection.execute(f"SELECT begin, size, began, at, blocks {of_file} ORDER BY begin", key)
        for merged, absorbed in _merges([_Chunk(*row) for row in kept]):
            connection.execute("INSERT OR REPLACE INTO log_arrivals VALUES (?, ?, ?, ?, ?, ?, ?)", (*key, *merged))
            connection.execute(f"DELETE {of_file} AND begin = ?", (*key, absorbed))

    def _make_room(self, connection: sqlite3.Connection) -> None:
        newest = max((seen.looked_at for seen in self._files.values()), default=_UNKNOWN)
        connection.execute("DELETE FROM log_arrivals WHERE at < ?", (newest - _KEPT_MILLISECONDS,))
        ((count,),) = connection.execute("SELECT COUNT(*) FROM log_arrivals")
        if count > _MOST_ROWS:
            connection.execute(
                "DELETE FROM log_arrivals WHERE (device, inode, begin) IN "
                "(SELECT device, inode, begin FROM log_arrivals ORDER BY at LIMIT ?)",
                (count - _MOST_ROWS,),
            )


def _merges(chunks: Sequence[_Chunk]) -> Iterable[tuple[_Chunk, int]]:
    """Yield merged chunks, each with the `begin` of the absorbed one.

    The two chunks whose common duration is smallest in proportion to their age are merged next, their blocks by twos.
    """
    left = list(chunks)
    while len(left) > MOST_CHUNKS:
        newest = left[-1].at  # of the chunk that may still grow, so it is not merged
        durations = [(second.at - first.began) / (newest - first.began + 1) for first, second in pairwise(left[:-1])]
        number = durations.index(min(durations))
        first, second = left[number], left[number + 1]
        blocks = [*first.blocks(), *second.blocks()]
        pairs = [
            Block(pair[-1].size, pair[0].after, pair[-1].at)
            for pair in (blocks[begin : begin + 2] for begin in range(0, len(blocks), 2))
        ]
        merged = _Chunk.of_blocks(first.begin, first.began, pairs)
        left[number : number + 2] = [merged]
        yield merged, second.begin


def _signed(key: FileKey) -> FileKey:
    device, inode = (number - 2**64 if number >= 2**63 else number for number in key)
    return device, inode


def _unsigned(number: int) -> int:
    return number % 2**64


def _milliseconds(at: datetime) -> int:
    return int(at.timestamp() * 1000)
