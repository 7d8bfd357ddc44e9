from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path

from trainmedic.wire.log_layout import ROTATED

log = logging.getLogger("trainmedic")

_OWNER_ONLY = 0o600


class RotatingFile:
    """A thread-safe file of about `most` bytes. At half of that it becomes ``….1`` and a new one starts.

    It is never truncated, so readers can finish the older half. Write errors lose data, which is logged.
    """

    def __init__(self, path: Path | None, most: int, content: str = "the job's output") -> None:
        self._path = path  # None: write nothing
        self._content = content
        self._half = max(most // 2, 1)
        self._size = 0
        self._lock = threading.Lock()
        self._file: int | None = None
        self._is_failing = False
        self._ends_in_partial_chunk = False
        if path is not None:
            try:
                self._open(path)
            except OSError as error:
                self._log_failure(error)

    def add(self, chunk: bytes) -> bool:
        """Return whether the chunk was written."""
        with self._lock:
            if self._path is None:
                return False
            try:
                self._write(self._path, chunk)
            except OSError as error:
                self._log_failure(error)
                return False
            if self._is_failing:
                self._is_failing = False
                log.warning("%s is written again: %s", self._content, self._path)
            return True

    def close(self) -> None:
        with self._lock:
            self._close_file()
            self._path = None

    def _write(self, path: Path, chunk: bytes) -> None:
        if self._file is not None and self._size and self._size + len(chunk) > self._half:
            self._close_file()
            path.replace(path.with_name(f"{path.name}{ROTATED}"))
        if self._file is None:
            self._open(path)
        assert self._file is not None
        if self._ends_in_partial_chunk:
            chunk = b"\n" + chunk
        view = memoryview(chunk)
        while view:
            written = os.write(self._file, view)
            view, self._size = view[written:], self._size + written
            self._ends_in_partial_chunk = bool(view)

    def _open(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(path, flags, _OWNER_ONLY)
        self._size = os.fstat(self._file).st_size

    def _log_failure(self, error: OSError) -> None:
        if not self._is_failing:
            self._is_failing = True
            log.warning("%s cannot be written: %s: %s", self._content, error.strerror, self._path)

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._file = None
