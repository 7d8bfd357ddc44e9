"""Messages between opener and reader. `Opened` and `AddConnection` carry a descriptor."""

from __future__ import annotations

import array
import os
import socket
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from trainmedic_agent.log_opening.node_files import FileFacts, ListedName, NamedBy, UnreadReason

MOST_BYTES = 1024 * 1024  # bytes of a message
_HEADER = 4  # bytes of a frame's length
_DESCRIPTOR_BYTES = array.array("i").itemsize


class Namer(Struct, frozen=True, array_like=True):
    """`NamedBy` with bytes as path: file names may not be UTF-8. None in a request: no file named its path."""

    path: bytes
    device: int
    inode: int

    @classmethod
    def of(cls, named_by: NamedBy | None) -> Namer | None:
        return None if named_by is None else cls(os.fsencode(named_by.path), named_by.device, named_by.inode)

    def named_by(self) -> NamedBy:
        return NamedBy(os.fsdecode(self.path), self.device, self.inode)


class OpenFile(Struct, frozen=True, tag="open"):
    path: bytes
    namer: Namer | None = None


class ListDirectory(Struct, frozen=True, tag="list"):
    path: bytes
    most: int
    namer: Namer | None = None


class InspectEntries(Struct, frozen=True, tag="facts"):
    path: bytes
    names: list[bytes]
    namer: Namer | None = None


class AddConnection(Struct, frozen=True, tag="connect"):
    """Request to serve the connection of the attached descriptor too. It has no answer."""


class Opened(Struct, frozen=True, tag="opened"):
    """Answer with a descriptor."""


class ListedPage(Struct, frozen=True, tag="listed"):
    device: int
    entries: list[tuple[bytes, int, bool]]
    is_cut: bool
    is_last: bool
    may_be_renamed: bool

    def listed(self) -> list[ListedName]:
        return [ListedName(os.fsdecode(name), inode, is_directory) for name, inode, is_directory in self.entries]


class InspectedEntries(Struct, frozen=True, tag="stated"):
    facts: list[FileFacts | None]  # in the order of the names; None for a missing entry


class RefusedAnswer(Struct, frozen=True, tag="unread"):
    reason: UnreadReason


class Failed(Struct, frozen=True, tag="failed"):
    number: int  # errno
    text: str


Request = OpenFile | ListDirectory | InspectEntries | AddConnection
OpenerAnswer = Opened | ListedPage | InspectedEntries | RefusedAnswer | Failed


MessageT = TypeVar("MessageT")


class FrameError(Exception):
    """The other side sent an invalid frame."""


def send(connection: socket.socket, message: Request | OpenerAnswer, descriptor: int | None = None) -> None:
    """Raises OSError, FrameError."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MOST_BYTES:
        raise FrameError(f"a message has {len(body):,} bytes; {MOST_BYTES:,} are allowed")
    frame = len(body).to_bytes(_HEADER, "big") + body
    sent = 0
    if descriptor is not None:
        sent = socket.send_fds(connection, [frame], [descriptor])
    connection.sendall(frame[sent:])


class FrameReader(Generic[MessageT]):
    def __init__(self, connection: socket.socket, decoder: msgspec.msgpack.Decoder[MessageT]) -> None:
        self._connection = connection
        self._decoder = decoder

    def next(self) -> tuple[MessageT, int | None] | None:
        """Return the message and its descriptor; None at the end. Raises OSError, FrameError."""
        frame = self._frame()
        if frame is None:
            return None
        body, descriptor = frame
        try:
            return self._decoder.decode(body), descriptor
        except (msgspec.DecodeError, ValueError) as error:
            if descriptor is not None:
                os.close(descriptor)
            raise FrameError(str(error)) from error

    def _frame(self) -> tuple[bytes, int | None] | None:
        space = socket.CMSG_SPACE(_DESCRIPTOR_BYTES)
        begin, control, *_ = self._connection.recvmsg(_HEADER, space, socket.MSG_CMSG_CLOEXEC)
        descriptor = _descriptor(control)
        try:
            header = begin + self._exactly(_HEADER - len(begin)) if begin else b""
            if not header:
                return None
            size = int.from_bytes(header, "big")
            if size > MOST_BYTES:
                raise FrameError(f"a frame has {size:,} bytes; {MOST_BYTES:,} are allowed")
            frame = self._exactly(size), descriptor
            descriptor = None  # the caller's now
            return frame
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _exactly(self, size: int) -> bytes:
        pieces = []
        while size:
            piece = self._connection.recv(size)
            if not piece:
                raise FrameError("the connection ended within a frame")
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)


def _descriptor(control: list[tuple[int, int, bytes]]) -> int | None:
    """Return the first descriptor, if any; close others."""
    descriptors = array.array("i")
    for level, kind, raw in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(raw[: len(raw) - len(raw) % _DESCRIPTOR_BYTES])
    for extra in descriptors[1:]:
        os.close(extra)
    return descriptors[0] if descriptors else None
