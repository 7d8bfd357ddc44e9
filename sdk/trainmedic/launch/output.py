"""What a job prints: passed on unchanged, and kept in files that stay bounded."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from pathlib import Path

from trainmedic.job.kept_file import KeptFile

_CHUNK = 64 * 1024
_LONGEST_TAIL = 128 * 1024
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_HEAD = 1024 * 1024


class OutputCopy:
    """A thread that passes on what comes from a pipe, keeps it, and remembers its end."""

    def __init__(self, source: int, sink: int, kept: KeptFile) -> None:
        self._source = source
        self._sink: int | None = sink
        self._kept = kept
        self._tail = b""
        self._thread = threading.Thread(target=self._run, name="trainmedic-output", daemon=True)
        self._thread.start()

    def tail(self) -> str:
        """The last that was printed."""
        return self._tail.decode(errors="replace")

    def finish(self, timeout: float) -> None:
        """Wait until everything has been passed on; a reader that does not read is waited for no longer than this."""
        self._thread.join(timeout)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(self._source, _CHUNK):
                self._kept.add(chunk)
                self._tail = (self._tail + chunk)[-_LONGEST_TAIL:]
                self._pass_on(chunk)
        os.close(self._source)

    def _pass_on(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        while self._sink is not None and view:
            try:
                view = view[os.write(self._sink, view) :]
            except OSError:  # nobody reads any more; the job goes on
                self._sink = None


def end_of(path: Path) -> str:
    """The last of a file. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _LONGEST_TAIL, 0))
        return file.read(_LONGEST_TAIL).decode(errors="replace")


def bound_file(path: Path, most: int) -> None:
    """Free the middle of a file that another process writes, where it has become larger than `most`.

    Its beginning and end stay where they are, so that whoever writes and reads it notices nothing; what lies between
    reads as zeros. Where the file system cannot do that (NFS before 4.2), the file stays as it is.
    """
    try:
        with path.open("r+b") as file:
            stat = os.fstat(file.fileno())
            if stat.st_blocks * 512 <= most:
                return
            length = stat.st_size - most // 2 - _HEAD
            if length > 0:
                _punch_hole(file.fileno(), _HEAD, length)
    except OSError:
        pass


def _punch_hole(file: int, offset: int, length: int) -> None:
    with contextlib.suppress(AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
        libc.fallocate(file, _PUNCH_HOLE, offset, length)
