"""The few calls of Linux that Python has no function for: the I/O priority of a thread and how long it
waited, holes in a file, the attributes of a file, and whether anybody else has a file open.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import os
import platform
import signal
import time

# ioprio_set(2): the number of the call, by machine; "this thread"; the class in the upper bits, best
# effort, and in the lower ones the last of its eight levels.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_WHO_PROCESS, _THIS_THREAD, _BEST_EFFORT_LAST = 1, 0, 2 << 13 | 7
# fallocate(2)
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
# ioctl_iflags(2): _IOR('f', 1, long) and two of its flags
_GETFLAGS, _IMMUTABLE, _APPEND_ONLY = 0x80086601, 0x10, 0x20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def make_io_last() -> None:
    """The calling thread gets the disk after everybody else of its class. Raises OSError."""
    number = _IOPRIO_SET.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"no I/O priority is known for {platform.machine()}")
    _check(_libc.syscall(number, _WHO_PROCESS, _THIS_THREAD, _BEST_EFFORT_LAST))


def waited_for_a_core() -> float:
    """Seconds that the calling thread was ready to run since it began, while others ran; 0 where it is not counted."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as facts:  # noqa: PTH123
            return int(facts.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def stalled_for_a_disk() -> float:
    """Seconds in which some task of this machine waited for a disk, since it was started (proc_pressure(5)); the
    time itself, as if somebody always did, where that is not counted."""
    try:
        with open("/proc/pressure/io", encoding="ascii") as facts:  # noqa: PTH123
            return int(facts.readline().rpartition("total=")[2]) / 1e6
    except (OSError, ValueError):
        return time.monotonic()


def punch_hole(fd: int, length: int) -> None:
    """Give back what the first `length` bytes of a file take on the disk; they read as zeros then. Raises OSError."""
    _check(_libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, 0, length))


def is_unchangeable(fd: int) -> bool:
    """Whether a file or directory has the attribute "immutable" or "append only"."""
    flags = array.array("l", [0])
    try:
        fcntl.ioctl(fd, _GETFLAGS, flags)
    except OSError:
        return False  # a filesystem without attributes
    return bool(flags[0] & (_IMMUTABLE | _APPEND_ONLY))


def lease(fd: int) -> bool:
    """Whether nobody else has the file open, for reading, writing or mapped, in any process of this machine.

    Until `fd` is closed, somebody who opens it waits. It is a write lease (fcntl(2), F_SETLEASE), which the
    kernel gives only then. Raises OSError where it gives none for other reasons: the file belongs to another
    user and this process lacks CAP_LEASE, or the filesystem knows no leases.
    """
    # Whoever opens the file makes the kernel send a signal here: one that is ignored by default, in
    # place of SIGIO, which would end the process.
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    return True


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
