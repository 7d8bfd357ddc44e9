"""A job's output, forwarded unchanged and stored in bounded files."""

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
_LONGEST_TAIL = 128 * 1024  # bytes
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
_KEPT_BEGINNING = 1024 * 1024  # bytes
# Seconds that a partial line waits, such as a prompt.
_LONGEST_HOLD = 0.5


class OutputCopies:
    """Thread that forwards and stores pipes' data, and remembers each one's end.

    Pipes are read in order, so that a failing program's standard error follows its standard output.
    """

    def __init__(self, pipes: Sequence[tuple[int, int]], kept: RotatingFile) -> None:
        self._pipes = [_Pipe(source, sink) for source, sink in pipes]
        self._kept = kept
        self._thread = threading.Thread(target=self._run, name="trainmedic-output", daemon=True)
        self._thread.start()

    def tail(self, source: int) -> str:
        """Return the end of this pipe's output."""
        return next(pipe for pipe in self._pipes if pipe.source == source).tail.decode(errors="replace")

    def finish(self, timeout: float) -> None:
        self._thread.join(timeout)

    def _run(self) -> None:
        open_pipes = list(self._pipes)
        while open_pipes:
            is_held = any(pipe.held for pipe in open_pipes)
            select.select([pipe.source for pipe in open_pipes], [], [], _LONGEST_HOLD if is_held else None)
            # Check each pipe again in turn: new data of the first is older than data of the next.
            for pipe in list(open_pipes):
                if select.select([pipe.source], [], [], 0)[0] and not self._copy(pipe):
                    open_pipes.remove(pipe)
                    os.close(pipe.source)
                    self._pass_on(pipe, len(pipe.held))
                if pipe.held and time.monotonic() - pipe.held_since >= _LONGEST_HOLD:
                    self._pass_on(pipe, len(pipe.held))

    def _copy(self, pipe: _Pipe) -> bool:
        try:
            chunk = os.read(pipe.source, _CHUNK)
        except OSError:  # a terminal that no process has open any more
            return False
        if not chunk:
            return False
        if not pipe.held:
            pipe.held_since = time.monotonic()
        pipe.held += chunk
        # Progress bars end their lines by a carriage return.
        whole = max(pipe.held.rfind(b"\n"), pipe.held.rfind(b"\r")) + 1
        self._pass_on(pipe, whole if len(pipe.held) - whole <= _CHUNK else len(pipe.held))
        return True

    def _pass_on(self, pipe: _Pipe, length: int) -> None:
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
            except BlockingIOError:  # a program that shares the terminal made it non-blocking
                select.select([], [pipe.sink], [])
            except OSError:  # no reader; the job continues
                pipe.sink = None


@dataclass
class _Pipe:
    source: int
    sink: int | None  # None once it has no reader
    tail: bytes = b""
    held: bytes = b""  # partial line
    held_since: float = 0.0


def end_of(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _LONGEST_TAIL, 0))
        return file.read(_LONGEST_TAIL).decode(errors="replace")


def bound_file(path: Path, most: int) -> None:
    """Free the middle of another process's file above `most` bytes.

    Beginning and end keep their offsets; the middle reads as zeros.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "r+b") as file:
            stat = os.fstat(file.fileno())
            if stat.st_blocks * 512 <= most:
                return
            length = stat.st_size - most // 2 - _KEPT_BEGINNING
            if length > 0:
                _punch_hole(file.fileno(), _KEPT_BEGINNING, length)
    except OSError:
        pass


def _punch_hole(file: int, offset: int, length: int) -> None:
    with contextlib.suppress(AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
        libc.fallocate(file, _PUNCH_HOLE, offset, length)
