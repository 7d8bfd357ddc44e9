"""Locks between a machine's processes until their end: on a file or a name."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import struct
import sys
import threading
import time
from pathlib import Path

from msgspec import Struct

log = logging.getLogger(__name__)

_SET_LOCK_COMMAND = getattr(fcntl, "F_OFD_SETLK", None)
# Locked byte after any file's end, and not among SQLite's.
_LOCKED_BYTE = 1 << 62
_NO_SUCH_LOCKS = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)

_BACKLOG = 128
_TRIES, _TRY_SECONDS = 100, 0.02
# Inodes that this process has locked.
_held_inodes: set[tuple[int, int]] = set()
_held_inodes_lock = threading.Lock()


class FileLock:
    """Lock on a file's inode, so links, bind mounts and containers share it.

    It survives other opens and closes of the file.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        self._inode = status.st_dev, status.st_ino
        self.owner = status.st_uid
        self.names = status.st_nlink  # number of hard links

    @classmethod
    def take(cls, path: Path, mode: int = 0o600) -> FileLock | None:
        """Lock the file, created if missing; None if this or another process holds it. Raises OSError.

        Ineffective if kernel or file system has no such locks.
        """
        with _held_inodes_lock:
            # Do not even open a file that this process holds: closing any descriptor ends SQLite's locks on it.
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if (status.st_dev, status.st_ino) in _held_inodes:
                    return None
            lock = cls(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode))
            is_locked = False
            try:
                is_locked = _lock_byte(lock._descriptor)
            finally:
                if not is_locked:
                    os.close(lock._descriptor)
            if not is_locked:
                return None
            _held_inodes.add(lock._inode)
            return lock

    def is_in_place(self) -> bool:
        """Return whether the path still leads to the locked file."""
        try:
            status = self._path.stat()
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._inode

    def release(self) -> None:
        """Release the lock, after SQLite has closed the file."""
        with _held_inodes_lock:
            if self._inode in _held_inodes:
                _held_inodes.discard(self._inode)
                os.close(self._descriptor)


def _lock_byte(descriptor: int) -> bool:
    """Return False if another process holds the lock."""
    if _SET_LOCK_COMMAND is None:
        return True
    # struct flock: type, whence, start, length, pid (must be 0)
    request = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, _LOCKED_BYTE, 1, 0)
    try:
        fcntl.fcntl(descriptor, _SET_LOCK_COMMAND, request)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in _NO_SUCH_LOCKS:
            raise
    return True


class Holder(Struct, frozen=True):
    """Holder of a name; None if unreported."""

    pid: int | None
    user: int | None


class NameLock:
    """Lock on a name in this network namespace: a socket in Linux's abstract namespace."""

    def __init__(self, held: socket.socket | None) -> None:
        self._held = held
        if held is not None:
            threading.Thread(target=_close_connections, args=(held,), name="name-lock", daemon=True).start()

    @classmethod
    def take(cls, name: str) -> NameLock | Holder:
        """Return the lock, or its holder. Ineffective without abstract sockets, or if the holder refuses for 2 s.

        Any user can bind any name, so the caller must decide whether the holder counts.
        """
        for _ in range(_TRIES if sys.platform == "linux" else 0):
            held = _bind(_address(name))
            if held is not None:
                return cls(held)
            if (holder := holder_of(name)) is not None:
                return holder
            time.sleep(_TRY_SECONDS)  # its holder has just ended, or does not listen yet
        if sys.platform == "linux":  # any user can cause this, so it must not block the caller
            log.warning("a lock has no effect: its unknown holder refuses connections", extra={"lock": name})
        return cls(None)

    def release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.shutdown(socket.SHUT_RDWR)  # ends accept(), which would keep the address
            held.close()


def holder_of(name: str) -> Holder | None:
    """Return None if no process listens on the name."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(_address(name))
        except ConnectionRefusedError:
            return None
        except BlockingIOError:  # the backlog is full
            return Holder(None, None)
        credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", credentials)
    return Holder(pid, user)


def _address(name: str) -> str:
    return f"\0trainmedic:{name}"


def _bind(address: str) -> socket.socket | None:
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        held.bind(address)
        held.listen(_BACKLOG)
    except OSError as error:
        held.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return held


def _close_connections(held: socket.socket) -> None:
    """Keep the backlog free: a full one hides the holder."""
    while True:
        try:
            held.accept()[0].close()
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EBADF):  # released
                return
            time.sleep(_TRY_SECONDS)  # such as without a free descriptor
