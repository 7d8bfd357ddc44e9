"""Disk space reserved for the journal: ``disk.clean`` must be journaled even on a full disk.

Random bytes, because compressing file systems would store nothing for zeros. The file gives up one piece at a time:
other writers may take the freed space first.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from pathlib import Path

log = logging.getLogger(__name__)

PIECE = 128 * 1024  # about ten transactions
PIECES = 8
_RETRY_SECONDS = 30.0  # after a failed refill
_FREE_SIZES = 8  # free space for a refill, in sizes of the file


class ReservedSpace:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = self._file_size()
        self._not_before = 0.0

    @property
    def is_short(self) -> bool:
        return self._size < PIECES * PIECE

    def free_piece(self) -> bool:
        """Return False if nothing was freed."""
        if self._size <= 0:
            return False
        left = max(self._size - PIECE, 0) // PIECE * PIECE
        try:
            if left:
                os.truncate(self._path, left)
            else:
                self._path.unlink()
        except OSError as error:
            log.error("cannot free reserved space", extra={"file": str(self._path), "reason": error.strerror})
            self._size = self._file_size()  # if it was deleted, it is created again later
            return False
        if not self.is_short:
            log.warning("disk full; using reserved space", extra={"file": str(self._path)})
        self._size = left
        return True

    def refill(self) -> None:
        if not self.is_short or time.monotonic() < self._not_before or not self._has_free_space():
            return
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.lseek(descriptor, self._size, os.SEEK_SET)
                for _ in range(self._size, PIECES * PIECE, PIECE):
                    _write(descriptor, secrets.token_bytes(PIECE))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            fields = {"file": str(self._path), "reason": error.strerror}
            log.warning("cannot refill reserved space; retrying", extra=fields)
            self._not_before = time.monotonic() + _RETRY_SECONDS
        self._size = self._file_size()

    def _file_size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def _has_free_space(self) -> bool:
        try:
            filesystem = os.statvfs(self._path.parent)
        except OSError:
            return False
        return filesystem.f_bavail * filesystem.f_frsize >= _FREE_SIZES * PIECES * PIECE


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
