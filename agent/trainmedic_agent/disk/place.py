"""Verification that an open directory is still at its path, because a descriptor survives moves.

Linux cannot resolve and delete atomically: a move within those microseconds costs one entry.
"""

from __future__ import annotations

import ctypes
import errno
import os

_OPENAT2 = 437  # system call number, because the C library has no wrapper
_NO_SYMLINKS = 0x04  # RESOLVE_NO_SYMLINKS
_LONGEST_PATH = 4000  # bytes; the kernel's limit is 4,095
_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE)
_NO_OPENAT2 = (errno.ENOSYS, errno.EPERM)  # errors of kernels before 5.6 and of system call filters


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_HOW = _OpenHow(_FLAGS, 0, _NO_SYMLINKS)
_openat2 = ctypes.CDLL(None, use_errno=True).syscall
_openat2.restype = ctypes.c_long
_openat2.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_OpenHow), ctypes.c_size_t)


def is_in_place(fd: int, path: str) -> bool:
    """Return whether `path` leads to `fd` without symbolic links. Raises OSError if unknown."""
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
    if len(path) > _LONGEST_PATH:
        return _open_by_parts(path)
    # The directory argument is ignored for absolute paths.
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
