"""Creation time of a file, by ``statx``. Python's `os.stat` does not return it on Linux."""

from __future__ import annotations

import ctypes
import struct
from datetime import UTC, datetime, timedelta
from functools import cache

_AT_EMPTY_PATH = 0x1000
_STATX_BTIME = 0x800
_BYTES = 256
_BTIME_AT = 80
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def born_at(fd: int) -> datetime | None:
    """Return when the open file was created. None if its file system does not record that, such as NFS before version
    4."""
    statx = _statx()
    if statx is None:
        return None
    facts = ctypes.create_string_buffer(_BYTES)
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_BTIME, facts) != 0:
        return None
    (mask,) = struct.unpack_from("=I", facts, 0)
    seconds, nanoseconds = struct.unpack_from("=qI", facts, _BTIME_AT)
    if not mask & _STATX_BTIME or seconds <= 0:
        return None
    return _EPOCH + timedelta(seconds=seconds, microseconds=nanoseconds // 1000)


@cache
def _statx() -> ctypes._NamedFuncPointer | None:
    """Return the C library's function. None if there is none."""
    try:
        function = ctypes.CDLL(None, use_errno=True).statx
    except (AttributeError, OSError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
    return function
