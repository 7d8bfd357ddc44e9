"""Socket to which the reader connects, protected by its mode and the peer's user (``SO_PEERCRED``)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

from trainmedic.errors import ConfigurationError

NAME = "reader.sock"
_LONGEST = 100  # bytes of a path that every kernel accepts
_ACCEPT_SECONDS = 0.5  # wait for a connection


class Peer:
    """The process at the other end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid, self.uid, self.gid = struct.unpack("3i", raw)
        self._handle: int | None = None
        # A process in another PID namespace has the number 0 here.
        if self.pid > 0:
            with contextlib.suppress(OSError):
                self._handle = os.pidfd_open(self.pid)

    def kill(self) -> bool:
        """Return False if not permitted, or if the process is in another PID namespace."""
        if self._handle is None:
            return False
        try:
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return True

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class LinkSocket:
    def __init__(self, directory: Path, reader_uid: int, reader_gid: int) -> None:
        """Raises ConfigurationError if the socket cannot be created."""
        self._path = directory / NAME
        self._uids: Collection[int] = {reader_uid, os.geteuid()}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            with short_path(self._path) as path:
                self._socket.bind(path)
            self._path.chmod(0o600)
            if reader_uid != os.geteuid():
                # By group, so that the agent stays the owner: an opener with the agent's user connects too.
                os.chown(self._path, -1, reader_gid)
                self._path.chmod(0o660)
            self._socket.listen(1)
        except OSError as error:
            self._socket.close()
            raise ConfigurationError(
                f"cannot accept log reader connections at {self._path}: {error.strerror or error}"
            ) from error
        self._socket.settimeout(_ACCEPT_SECONDS)

    def accept(self) -> tuple[socket.socket, Peer] | None:
        """Return the next connection of the reader's or this process's user. Raises OSError.

        None after a short wait, or if another user connects.
        """
        try:
            connection, _ = self._socket.accept()
        except TimeoutError:
            return None
        peer = Peer(connection)
        if peer.uid in self._uids:
            return connection, peer
        peer.close()
        connection.close()
        return None

    def wake(self) -> None:
        """End a running `accept`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


def connect(directory: Path) -> socket.socket:
    """Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with short_path(directory / NAME) as path:
            connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yield an equivalent path short enough for a socket. Raises OSError."""
    if len(os.fsencode(path)) <= _LONGEST:
        yield str(path)
        return
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
