"""What a job prints: passed on unchanged, and kept in files that stay bounded."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

from trainmedic.job.rotating_file import RotatingFile

_CHUNK = 64 * 1024
_LONGEST_TAIL = 128 * 1024
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_HEAD = 1024 * 1024
_LONGEST_HOLD = 0.5
"""Seconds that the beginning of a line waits for its rest. A prompt has no rest."""


class OutputCopies:
    """Thread that forwards the data of pipes, stores it, and remembers the end of each.

    If several pipes have data, the first is read first. A failing program prints its last words to standard error,
    after its standard output. In another order it would seem to continue. Lines of different pipes are not mixed: the
    beginning of a line waits for the rest of it, up to `_LONGEST_HOLD` seconds.
    """

    def __init__(self, pipes: Sequence[tuple[int, int]], kept: RotatingFile) -> None:
        """`pipes` are sources, each with the file descriptor of its destination."""
        self._pipes = [_Pipe(source, sink) for source, sink in pipes]
        self._kept = kept
        self._thread = threading.Thread(target=self._run, name="trainmedic-output", daemon=True)
        self._thread.start()

    def tail(self, number: int) -> str:
        """Return the last data of a pipe, by its number."""
        return self._pipes[number].tail.decode(errors="replace")

    def finish(self, timeout: float) -> None:
        """Wait until everything has been passed on; a reader that does not read is waited for no longer than this."""
        self._thread.join(timeout)

    def _run(self) -> None:
        open_ = list(self._pipes)
        while open_:
            is_held = any(pipe.held for pipe in open_)
            select.select([pipe.source for pipe in open_], [], [], _LONGEST_HOLD if is_held else None)
            # Check each pipe again in turn: data that came to the first one by now is older than that in the next.
            for pipe in list(open_):
                if select.select([pipe.source], [], [], 0)[0] and not self._copy(pipe):
                    open_.remove(pipe)
                    os.close(pipe.source)
                    self._pass_on(pipe, len(pipe.held))
                if pipe.held and time.monotonic() - pipe.held_since >= _LONGEST_HOLD:
                    self._pass_on(pipe, len(pipe.held))

    def _copy(self, pipe: _Pipe) -> bool:
        """Copy the data in a pipe up to the end of its last line. Return whether more can come."""
        try:
            chunk = os.read(pipe.source, _CHUNK)
        except OSError:  # of a terminal that no process has open any more
            return False
        if not chunk:
            return False
        if not pipe.held:
            pipe.held_since = time.monotonic()
        pipe.held += chunk
        # A progress bar ends its lines by a carriage return.
        whole = max(pipe.held.rfind(b"\n"), pipe.held.rfind(b"\r")) + 1
        self._pass_on(pipe, whole if len(pipe.held) - whole <= _CHUNK else len(pipe.held))
        return True

    def _pass_on(self, pipe: _Pipe, length: int) -> None:
        """Pass on and keep the first bytes of what is held of a pipe."""
        if not length:
            return
        data, pipe.held = pipe.held[:length], pipe.held[length:]
        pipe.held_since = time.monotonic()
        self._kept.add(data)
        pipe.tail = (pipe.tail + data)[-_LONGEST_TAIL:]
        view = memoryview(data)
        while pipe.sink is not None and view:
            try:
                view = view[os.write(pipe.sink, view) :]
            except OSError:  # nobody reads any more; the job goes on
                pipe.sink = None


@dataclass
class _Pipe:
    """A pipe from the job's processes."""

    source: int
    sink: int | None
    tail: bytes = b""
    held: bytes = b""
    """The beginning of a line whose rest has not come."""
    held_since: float = 0.0


def end_of(path: Path) -> str:
    """The last of a file. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _LONGEST_TAIL, 0))
        return file.read(_LONGEST_TAIL).decode(errors="replace")


def bound_file(path: Path, most: int) -> None:
    """Free the middle of a file that another process writes, where it has become larger than `most`.

    Its beginning and end stay where they are, so that whoever writes and reads it notices nothing; what lies between
    reads as zeros. Where the file system cannot do that (NFS before 4.2), the file stays as it is, and so does what a
    link points to.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "r+b") as file:
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
