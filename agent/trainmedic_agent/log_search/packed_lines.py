"""Matching lines of a gzip file, decompressed piecewise. Offsets count uncompressed bytes."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from datetime import tzinfo

from trainmedic_agent.log_reading.line_cutter import LineCutter
from trainmedic_agent.log_search.line_clock import LineClock
from trainmedic_agent.log_search.line_filter import LineFilter
from trainmedic_agent.log_search.wanted_lines import FilePlace, LinesOfFile, ReadBudget
from trainmedic_logs.domain import file_times
from trainmedic_logs.domain.finding import Origin

MOST_UNPACKED = 128 * 1024 * 1024  # uncompressed bytes of a file that are searched
_PIECE = 256 * 1024  # uncompressed bytes at a time
_READ = 64 * 1024  # compressed bytes per read
_GZIP = 31  # zlib's `wbits` for gzip


class PackedLines(LinesOfFile):
    is_whole = True

    def __init__(
        self,
        fd: int,
        origin: Origin,
        line_filter: LineFilter,
        budget: ReadBudget,
        zone: tzinfo | None = None,
    ) -> None:
        """Raises OSError."""
        self._fd = fd
        facts = os.fstat(fd)
        clock = LineClock(file_times.written_at(facts), zone=zone)
        super().__init__(f"{facts.st_dev:x}-{facts.st_ino:x}", origin, line_filter, clock, budget)
        self.is_cut = False  # True if the file is damaged, ends early or is larger than `MOST_UNPACKED`
        self._cutter = LineCutter()
        self._unpacking = zlib.decompressobj(_GZIP)
        self._packed_offset = 0  # compressed bytes read
        self._member_begin = 0
        self._unpacked = 0  # bytes decompressed from the start

    def begin(self, places: Mapping[str, FilePlace]) -> None:
        self.go_to(places.get(self.key, FilePlace()))

    @property
    def _has_unread(self) -> bool:
        return True  # as far as is known

    def _next_piece(self) -> bytes:
        if self._cutter.offset < self._unpacked:  # the cutter went back
            self._unpacking = zlib.decompressobj(_GZIP)
            self._packed_offset = self._member_begin = self._unpacked = 0
        while not self._budget.is_stopped:
            if self._unpacked >= MOST_UNPACKED:
                self.is_cut = True
                return b""
            try:
                piece = self._unpack()
            except zlib.error:
                self.is_cut = True
                return b""
            if not piece:
                return b""
            begin, self._unpacked = self._unpacked, self._unpacked + len(piece)
            if self._unpacked > self._cutter.offset:
                return piece[max(self._cutter.offset - begin, 0) :]
        return b""

    def _unpack(self) -> bytes:
        while True:
            if self._unpacking.eof:
                # A file can have several gzip members.
                rest = self._unpacking.unused_data
                self._packed_offset -= len(rest)
                self._member_begin = self._packed_offset
                self._unpacking = zlib.decompressobj(_GZIP)
            packed = self._unpacking.unconsumed_tail
            if not packed:
                packed = os.pread(self._fd, _READ, self._packed_offset)
                self._packed_offset += len(packed)
                if not packed:
                    self.is_cut = self.is_cut or self._packed_offset > self._member_begin
                    return b""
            piece = self._unpacking.decompress(packed, _PIECE)
            if piece:
                return piece
