"""Whether an open directory is still where its path says.

A descriptor goes on naming its directory when that is moved: out of its root, below a name that the rule excludes, or
out of sight below a new mount. So right before anything is taken from a directory, its whole path is looked up again,
through no symbolic link, and what is there is compared with what is open. The same path is matched and excluded by
the same patterns, so nothing else has to be asked again.

Linux has no call that does both, "look up" and "delete", so between the two some microseconds remain. A move that
falls into them costs what is deleted just then: one entry, which the rule meant and which was in its place.
"""

from __future__ import annotations

import ctypes
import errno
import os

_OPENAT2 = 437
"""The number of the system call openat2(2), the same on x86_64 and aarch64; the C library has no function for it."""
_NO_SYMLINKS = 0x04  # RESOLVE_NO_SYMLINKS
_LONGEST_PATH = 4000
"""Bytes of a path that are looked up in one call; the kernel takes 4,095."""
_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE)
_NO_OPENAT2 = (errno.ENOSYS, errno.EPERM)
"""Errors of a kernel before 5.6, and of a container whose filter of system calls is older than this one."""


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_HOW = _OpenHow(_FLAGS, 0, _NO_SYMLINKS)
_openat2 = ctypes.CDLL(None, use_errno=True).syscall
_openat2.restype = ctypes.c_long
_openat2.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_OpenHow), ctypes.c_size_t)


def is_in_place(fd: int, path: str) -> bool:
    """Whether the open directory `fd` is the one to which the absolute `path` leads now, through no symbolic link.

    Raises OSError where that cannot be found out.
    """
    try:
        there = _open_path(os.fsencode(path))
    except OSError as error:
        if error.errno in _GONE:
            return False
        raise
    try:
        return os.path.samestat(os.fstat(there), os.fstat(fd))
    finally:
        os.close(there)


def _open_path(path: bytes) -> int:
    """The directory at an absolute path, open for looking at it only. Raises OSError."""
    if len(path) > _LONGEST_PATH:
        return _open_by_parts(path)
    # The directory that the call takes for relative paths is not looked at.
    there = int(_openat2(_OPENAT2, -1, path, ctypes.byref(_HOW), ctypes.sizeof(_HOW)))
    if there >= 0:
        return there
    number = ctypes.get_errno()
    if number in _NO_OPENAT2:
        return _open_by_parts(path)
    raise OSError(number, os.strerror(number), os.fsdecode(path))


def _open_by_parts(path: bytes) -> int:
    fd = os.open("/", _FLAGS)
    for name in path.strip(b"/").split(b"/"):
        try:
            child = os.open(name, _FLAGS, dir_fd=fd)
        finally:
            os.close(fd)
        fd = child
    return fd
