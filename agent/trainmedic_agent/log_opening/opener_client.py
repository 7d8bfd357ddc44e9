from __future__ import annotations

import errno
import os
import socket
import threading
import weakref
from collections.abc import Sequence

import msgspec

from trainmedic_agent.log_opening import opener_frames
from trainmedic_agent.log_opening.node_files import FileFacts, ListedName, Listing, LogRefused, NamedBy
from trainmedic_agent.log_opening.opener import MOST_NAMES
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
    OpenerAnswer,
    OpenFile,
    RefusedAnswer,
    Request,
)


class OpenerClient:
    """`NodeFiles` that uses the opener. Each thread has its own connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._first = connection  # used only to add the threads' connections
        self._lock = threading.Lock()
        self._local = threading.local()  # `connection`: the thread's
        self._open: weakref.WeakSet[_Connection] = weakref.WeakSet()

    def open(self, path: str, named_by: NamedBy | None = None) -> int:
        answer, descriptor = self._ask(OpenFile(os.fsencode(path), Namer.of(named_by)))
        if not isinstance(answer, Opened):
            raise _broken("the opener sent no file")
        if descriptor is None:  # the kernel passes none beyond this process's limit
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return descriptor

    def listing(self, path: str, most: int, named_by: NamedBy | None = None) -> Listing:
        answer, _ = self._ask(ListDirectory(os.fsencode(path), most, Namer.of(named_by)))
        entries: list[ListedName] = []
        while isinstance(answer, ListedPage):
            entries += answer.listed()
            if answer.is_last:
                return Listing(answer.device, entries, answer.is_cut, answer.may_be_renamed)
            answer, _ = self._receive()
        raise _broken("the opener sent no listing")

    def facts(self, path: str, names: Sequence[str], named_by: NamedBy | None = None) -> list[FileFacts | None]:
        every: list[FileFacts | None] = []
        for begin in range(0, len(names), MOST_NAMES):
            part = [os.fsencode(name) for name in names[begin : begin + MOST_NAMES]]
            answer, _ = self._ask(InspectEntries(os.fsencode(path), part, Namer.of(named_by)))
            if not isinstance(answer, InspectedEntries) or len(answer.facts) != len(part):
                raise _broken("the opener sent no facts")
            every += answer.facts
        return every

    def close(self) -> None:
        with self._lock:
            for connection in list(self._open):
                connection.close()
            self._first.close()

    def _ask(self, request: Request) -> tuple[OpenerAnswer, int | None]:
        try:
            opener_frames.send(self._connection(), request)
        except OSError:
            self._forget_connection()
            raise
        return self._receive()

    def _receive(self) -> tuple[OpenerAnswer, int | None]:
        """Raises OSError, LogRefused."""
        connection: _Connection = self._local.connection
        try:
            received = connection.reader.next()
        except (FrameError, OSError) as error:
            self._forget_connection()
            raise _broken(str(error)) from error
        if received is None:
            self._forget_connection()
            raise _broken("the opener has gone")
        answer: OpenerAnswer = received[0]
        if isinstance(answer, RefusedAnswer):
            raise LogRefused(answer.reason)
        if isinstance(answer, Failed):
            raise OSError(answer.number, answer.text)
        return answer, received[1]

    def _forget_connection(self) -> None:
        vars(self._local).pop("connection", None)  # the next request makes another

    def _connection(self) -> socket.socket:
        if not hasattr(self._local, "connection"):
            own, far = socket.socketpair()
            try:
                with self._lock:
                    opener_frames.send(self._first, AddConnection(), far.fileno())
            except OSError:
                own.close()
                raise
            finally:
                far.close()
            made = self._local.connection = _Connection(own)
            with self._lock:
                self._open.add(made)
        connection: _Connection = self._local.connection
        return connection.socket


class _Connection:
    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.reader: FrameReader[OpenerAnswer] = FrameReader(connection, msgspec.msgpack.Decoder(OpenerAnswer))

    def close(self) -> None:
        self.socket.close()

    def __del__(self) -> None:
        self.close()


def _broken(text: str) -> OSError:
    return OSError(errno.EPIPE, text)
