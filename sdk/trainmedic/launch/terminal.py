from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import termios
from types import FrameType
from typing import Callable

_FALLBACK_SIZE = (24, 120)  # rows, columns


def open_terminal() -> tuple[int, int]:
    """Return the reading and the printing descriptor. Raises OSError."""
    reading, printing = os.openpty()
    attributes = termios.tcgetattr(printing)
    attributes[1] &= ~termios.OPOST  # no carriage returns before line feeds
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(printing, termios.TCSANOW, attributes)
    resize(reading)
    return reading, printing


def resize(terminal: int) -> None:
    rows, columns = _size()
    with contextlib.suppress(OSError):
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def follow_size(change: Callable[[], None]) -> None:
    def changed(number: int, frame: FrameType | None) -> None:
        change()

    signal.signal(signal.SIGWINCH, changed)


def _size() -> tuple[int, int]:
    for descriptor in (1, 2, 0):
        with contextlib.suppress(OSError):
            size = os.get_terminal_size(descriptor)
            if size.lines and size.columns:
                return size.lines, size.columns
    sizes = [os.environ.get(name, "") for name in ("LINES", "COLUMNS")]
    stated = [int(text) if text.isascii() and text.isdigit() and 0 < int(text) < 65536 else None for text in sizes]
    return stated[0] or _FALLBACK_SIZE[0], stated[1] or _FALLBACK_SIZE[1]
