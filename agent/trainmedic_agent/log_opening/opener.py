"""Privileged process that opens files for the unprivileged reader, and reads none.

Each connection has a thread: a hanging file system blocks only one.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading

import msgspec

from trainmedic_agent.log_opening import opener_frames
from trainmedic_agent.log_opening.node_files import LogRefused, NamedBy, NodeFiles
from trainmedic_agent.log_opening.opener_frames import (
    AddConnection,
    Failed,
    FrameError,
    FrameReader,
    InspectedEntries,
    InspectEntries,
    ListDirectory,
    ListedPage,
    Namer,
    Opened,
    OpenFile,
    RefusedAnswer,
    Request,
)

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 32  # besides the first; each thread of the reader that uses files has one
MOST_LISTED = 200_000  # entries of a directory
MOST_NAMES = 2000  # names of a request for facts
_PAGE = 1000  # entries of a message


class FileOpener:
    def __init__(self, files: NodeFiles) -> None:
        self._files = files
        self._free_connections = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def serve(self, connection: socket.socket) -> None:
        reader: FrameReader[Request] = FrameReader(connection, msgspec.msgpack.Decoder(Request))
        with connection, contextlib.suppress(OSError):
            while (received := self._next(reader)) is not None:
                request, descriptor = received
                if isinstance(request, AddConnection):
                    self._add_connection(descriptor)
                    continue
                if descriptor is not None:
                    os.close(descriptor)
                self._answer(connection, request)

    def _next(self, reader: FrameReader[Request]) -> tuple[Request, int | None] | None:
        """Return None at the end, or after an invalid frame."""
        try:
            return reader.next()
        except FrameError as error:
            log.warning("closing a connection to the opener: invalid frame", extra={"reason": str(error)})
            return None

    def _add_connection(self, descriptor: int | None) -> None:
        if descriptor is None:
            return
        try:
            further = socket.socket(fileno=descriptor)
        except OSError:  # another kind of file
            os.close(descriptor)
            raise
        if not self._free_connections.acquire(blocking=False):
            log.warning("too many connections to the opener", extra={"most": MOST_CONNECTIONS})
            further.close()
            return
        threading.Thread(target=self._serve_further, args=(further,), name="log-opener", daemon=True).start()

    def _serve_further(self, connection: socket.socket) -> None:
        try:
            self.serve(connection)
        finally:
            self._free_connections.release()

    def _answer(self, connection: socket.socket, request: Request) -> None:
        try:
            if isinstance(request, OpenFile):
                fd = self._files.open(os.fsdecode(request.path), _named_by(request.namer))
                try:
                    opener_frames.send(connection, Opened(), fd)
                finally:
                    os.close(fd)
            elif isinstance(request, ListDirectory):
                self._list(connection, request)
            elif isinstance(request, InspectEntries):
                names = [os.fsdecode(name) for name in request.names[:MOST_NAMES]]
                facts = self._files.facts(os.fsdecode(request.path), names, _named_by(request.namer))
                opener_frames.send(connection, InspectedEntries(facts))
        except LogRefused as refused:
            opener_frames.send(connection, RefusedAnswer(refused.reason))
        except OSError as error:
            opener_frames.send(connection, Failed(error.errno or errno.EIO, error.strerror or str(error)))

    def _list(self, connection: socket.socket, request: ListDirectory) -> None:
        most = max(min(request.most, MOST_LISTED), 0)
        listing = self._files.listing(os.fsdecode(request.path), most, _named_by(request.namer))
        entries = [(os.fsencode(each.name), each.inode, each.is_directory) for each in listing.entries]
        for begin in range(0, max(len(entries), 1), _PAGE):
            is_last = begin + _PAGE >= len(entries)
            part = entries[begin : begin + _PAGE]
            page = ListedPage(listing.device, part, listing.is_cut, is_last, listing.may_be_renamed)
            opener_frames.send(connection, page)


def _named_by(namer: Namer | None) -> NamedBy | None:
    return None if namer is None else namer.named_by()
