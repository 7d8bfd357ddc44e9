"""Locks between the processes of one machine: on a file, by whatever name it is reached, and on a name.

Both end with the process, however it ends, so nothing has to be cleaned up and the next start waits for nobody. Who
takes them: ``sql_store.database`` and ``trainmedic_agent.database``, so that no two processes work from one database or
from copies of it, and ``agent.gpu_locks``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import sys
import threading
import time
from pathlib import Path

from msgspec import Struct

_SET_LOCK = getattr(fcntl, "F_OFD_SETLK", None)
_BYTE = 1 << 62
"""The byte that is locked: beyond the end of any file, and beyond the bytes that SQLite locks itself."""
_NO_SUCH_LOCKS = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)

_BACKLOG = 128
_TRIES, _TRY_SECONDS = 100, 0.02

_own: set[tuple[int, int]] = set()
"""Device and inode of the files that this process holds."""
_own_lock = threading.Lock()


class FileLock:
    """A file that this process holds, for as long as it lives. Made by `take`.

    The lock is on the inode: a symlink, a hard link, a bind mount, or another container's view of the same volume all
    lead to it. It is a lock of the open file description, which no other open or close of the file drops, and it is
    on a byte that SQLite does not use, also where a network file system has one kind of lock only.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        self._inode = status.st_dev, status.st_ino
        self.owner = status.st_uid
        """The user whom the file belongs to."""
        self.names = status.st_nlink
        """How many names the file has; more than one are hard links."""

    @classmethod
    def take(cls, path: Path, mode: int = 0o600) -> FileLock | None:
        """Return the lock on the file at `path`, which is made where it is missing; None where it is held.

        Where the kernel or the file system has no such locks, nothing is locked. Raises OSError.
        """
        with _own_lock:
            # Closing any descriptor of a file ends the locks that SQLite has on it in the same process. So a file
            # that this process holds is not even opened.
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if (status.st_dev, status.st_ino) in _own:
                    return None
            lock = cls(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode))
            if not _locked(lock._descriptor):
                os.close(lock._descriptor)
                return None
            _own.add(lock._inode)
            return lock

    def is_in_place(self) -> bool:
        """Whether the path still leads to the file: it was neither removed nor replaced."""
        try:
            status = self._path.stat()
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._inode

    def release(self) -> None:
        """Let the file go. SQLite must have closed it before."""
        with _own_lock:
            if self._inode in _own:
                _own.discard(self._inode)
                os.close(self._descriptor)


def _locked(descriptor: int) -> bool:
    if _SET_LOCK is None:
        return True
    # struct flock: type, whence, start, length, pid, which must be 0
    request = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, _BYTE, 1, 0)
    try:
        fcntl.fcntl(descriptor, _SET_LOCK, request)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in _NO_SUCH_LOCKS:
            raise
    return True


class Holder(Struct, frozen=True):
    """Who holds a name: ``pid`` and ``user`` of the process; both None where the kernel does not say."""

    pid: int | None
    user: int | None


class NameLock:
    """A name that this process holds among those of its network namespace. Made by `take`.

    It is the address of a socket in the kernel's abstract namespace. Who connects learns from the kernel whose it is,
    and nothing else.
    """

    def __init__(self, held: socket.socket | None) -> None:
        self._held = held
        if held is not None:
            threading.Thread(target=_hang_up, args=(held,), name="name-lock", daemon=True).start()

    @classmethod
    def take(cls, name: str) -> NameLock | Holder:
        """Return the lock on `name`, or who holds it.

        Any user can bind any such address, so the caller decides whether the holder counts: else a stranger could keep
        it from ever starting. Where the operating system has no such addresses, nothing is locked.
        """
        for _ in range(_TRIES if sys.platform == "linux" else 0):
            held = _bound(_address(name))
            if held is not None:
                return cls(held)
            if (holder := holder_of(name)) is not None:
                return holder
            time.sleep(_TRY_SECONDS)  # its holder has just ended, or does not listen yet
        return cls(None)

    def release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.shutdown(socket.SHUT_RDWR)  # ends the thread's wait, which would keep the address
            held.close()


def holder_of(name: str) -> Holder | None:
    """Return who holds a name; None where nobody does."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(_address(name))
        except ConnectionRefusedError:
            return None
        except BlockingIOError:  # more have asked than were answered
            return Holder(None, None)
        credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", credentials)
    return Holder(pid, user)


def _address(name: str) -> str:
    return f"\0trainmedic:{name}"


def _bound(address: str) -> socket.socket | None:
    """A socket that listens at `address`; None where another one has it."""
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


def _hang_up(held: socket.socket) -> None:
    """A thread's life: end each connection, so that there is room for who asks next."""
    with contextlib.suppress(OSError):  # released
        while True:
            held.accept()[0].close()
