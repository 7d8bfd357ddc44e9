"""TCP connections that a test can cut or keep silent, and what was said over them.

Here: ports of the loopback that lead to others. Not here: whose they are, and when they are cut. One that leads to
several ports is what a Service of Kubernetes is to its clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import httptools

_PART = 1 << 16


@dataclass(frozen=True)
class Connection:
    """What has passed over one connection: what its client has sent, and what it was given."""

    sent: bytearray = field(default_factory=bytearray)
    given: bytearray = field(default_factory=bytearray)


class Wire:
    """A port that leads to `targets`, each connection to the next of them. Made by `Wires.to`.

    Its methods may be called by any thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, targets: Sequence[int], *, keeps: bool) -> None:
        self._loop = loop
        self._targets = itertools.cycle(targets)
        self._keeps = keeps
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.connections: list[Connection] = []
        """All that there have been, where they are kept."""
        self._is_cut = False
        self._passing = asyncio.Event()
        self._passing.set()
        self._ends: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    def through(self, url: str) -> str:
        """The URL of the one target, by way of this wire."""
        return url.replace(f":{next(self._targets)}", f":{self.port}")

    def cut(self) -> None:
        """End every connection, and every new one at once, until it is mended."""
        self._call(self._cut)

    def silence(self) -> None:
        """Let nothing through until it is mended; what waits then arrives late."""
        self._call(self._passing.clear)

    def mend(self) -> None:
        self._call(self._mend)

    async def serve(self) -> None:
        self._server = await asyncio.start_server(self._join, sock=self._listening)

    async def end(self) -> None:
        self._server.close()
        self._cut()
        self._passing.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _call(self, change: Callable[[], object]) -> None:
        async def changed() -> None:
            change()

        asyncio.run_coroutine_threadsafe(changed(), self._loop).result()

    def _cut(self) -> None:
        self._is_cut = True
        for end in self._ends:
            end.transport.abort()

    def _mend(self) -> None:
        self._is_cut = False
        self._passing.set()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        ends = [writer]
        self._ends.add(writer)
        try:
            await self._passing.wait()
            if self._is_cut:
                return
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", next(self._targets))
            ends.append(there_writer)
            self._ends.add(there_writer)
            connection = Connection()
            if self._keeps:
                self.connections.append(connection)
            await asyncio.gather(
                self._pass_on(reader, there_writer, connection.sent),
                self._pass_on(there_reader, writer, connection.given),
            )
        except OSError:
            ends[0].transport.abort()  # as the other side has ended, or nobody listens there
        finally:
            for end in ends:
                self._ends.discard(end)
                end.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passed: bytearray) -> None:
        while part := await reader.read(_PART):
            await self._passing.wait()
            writer.write(part)
            await writer.drain()
            if self._keeps:
                passed += part
        await self._passing.wait()
        with contextlib.suppress(OSError):
            writer.write_eof()


class Wires:
    """Wires that lead on while the context lasts, all served by one thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(daemon=True, target=self._loop.run_forever, name="wires")
        self._wires: list[Wire] = []

    def to(self, *targets: int, keeps: bool = False) -> Wire:
        """A new wire to these ports of the loopback; where it `keeps`, what passes can be read afterwards."""
        wire = Wire(self._loop, targets, keeps=keeps)
        self._wires.append(wire)
        return wire

    def __enter__(self) -> Self:
        self._thread.start()
        for wire in self._wires:
            asyncio.run_coroutine_threadsafe(wire.serve(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        for wire in self._wires:
            asyncio.run_coroutine_threadsafe(wire.end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Messages:
    """Notes each whole message of one side of a connection, for httptools."""

    def __init__(self, kind: Callable[[Any], Any], content: bytes) -> None:
        self.whole: list[tuple[bytes, bytes, int]] = []
        """Path, body and status, as far as a message has them."""
        self._path, self._body = b"", b""
        self._parser = kind(self)
        with contextlib.suppress(httptools.HttpParserError):  # it was cut off
            self._parser.feed_data(content)

    def on_message_begin(self) -> None:
        self._path, self._body = b"", b""

    def on_url(self, part: bytes) -> None:
        self._path += part

    def on_body(self, part: bytes) -> None:
        self._body += part

    def on_message_complete(self) -> None:
        status = getattr(self._parser, "get_status_code", int)()
        self.whole.append((self._path, self._body, status))


def acknowledged(wire: Wire, path: str) -> Iterator[Any]:
    """The JSON of each request to `path` that was answered 200, as far as the client has got the whole answer."""
    for connection in wire.connections:
        requests = _Messages(httptools.HttpRequestParser, bytes(connection.sent)).whole
        answers = _Messages(httptools.HttpResponseParser, bytes(connection.given)).whole
        for (asked, body, _), (_, _, status) in zip(requests, answers, strict=False):
            if asked == path.encode() and status == 200:
                yield json.loads(body)
