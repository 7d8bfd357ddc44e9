"""Frames on a stream socket: length (four bytes, big-endian), payload."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading

_HEADER = struct.Struct(">I")
SEND_SECONDS = 5.0  # time in which the other end must accept some bytes


class LinkClosed(ConnectionError):
    """The other end closed the link or did not accept bytes in time."""


class FrameFault(Exception):
    """The other end violated the protocol; close the link."""


class FrameStream:
    """One end of a link. Any thread may send, one receives frames of up to `largest` bytes."""

    def __init__(self, connection: socket.socket, largest: int) -> None:
        self._socket = connection
        self._largest = largest
        self._lock = threading.Lock()
        # A timeout of the Python socket would limit receiving too.
        seconds, micros = int(SEND_SECONDS), int(SEND_SECONDS % 1 * 1e6)
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, micros))

    def send(self, payload: bytes) -> None:
        """Raises LinkClosed, after which the link is unusable."""
        with self._lock:
            try:
                self._socket.sendall(_HEADER.pack(len(payload)) + payload)
            except OSError as error:
                self.close()
                raise LinkClosed(f"a message could not be sent: {error.strerror or error}") from error

    def receive(self) -> bytes:
        """Raises LinkClosed, FrameFault."""
        (length,) = _HEADER.unpack(self._exactly(_HEADER.size))
        if length > self._largest:
            raise FrameFault(f"a frame of {length} bytes exceeds the limit of {self._largest}")
        return self._exactly(length)

    def wait_for_end(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        while not poll.poll():
            continue

    def close(self) -> None:
        """End the link, from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Free the socket, in the receiving thread."""
        self.close()
        self._socket.close()

    def _exactly(self, length: int) -> bytes:
        buffer = bytearray(length)
        view, received = memoryview(buffer), 0
        while received < length:
            try:
                count = self._socket.recv_into(view[received:])
            except OSError as error:
                raise LinkClosed(error.strerror or str(error)) from error
            if not count:
                raise LinkClosed("the other end has closed the link")
            received += count
        return bytes(buffer)
