"""Requests handed on to a leader that is a socket: what arrives there, what comes back, and who lets go of whom."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from trainmedic_server.http import forwarding
from trainmedic_server.http.forwarding import ClientLeft, CutOff, Forwarder

Answering = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-by: leader\r\n\r\n"


class Leader:
    """Listens at ``address``; ``heads`` are of the requests that came."""

    def __init__(self, answer: Answering | None = None) -> None:
        self._answer = answer
        self.address = ""
        self.heads: list[bytes] = []
        self.connections = 0
        self.gone = asyncio.Event()
        self.serving: dict[asyncio.Task[Any] | None, asyncio.StreamWriter] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.serving[asyncio.current_task()] = writer
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                self.heads.append(await reader.readuntil(b"\r\n\r\n"))
                if self._answer is None:
                    writer.write(OK + b"ok")
                else:
                    await self._answer(reader, writer)
        self.gone.set()
        writer.close()


@contextlib.asynccontextmanager
async def leading(answer: Answering | None = None) -> AsyncIterator[Leader]:
    leader = Leader(answer)
    server = await asyncio.start_server(leader.serve, "127.0.0.1", 0)
    leader.address = "{}:{}".format(*server.sockets[0].getsockname())
    try:
        yield leader
    finally:
        server.close()
        for writer in leader.serving.values():
            writer.transport.abort()
        await asyncio.gather(*filter(None, leader.serving), return_exceptions=True)


class Client:
    """What the ASGI server makes of a client: the parts of its body, then silence; and what it was answered."""

    def __init__(self, method: str = "GET", *parts: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        self.scope: dict[str, Any] = {"type": "http", "method": method, "path": "/a b", "raw_path": b"/a%20b"}
        self.scope |= {"query_string": b"c=d", "headers": [(b"host", b"console"), *headers]}
        self._parts = list(parts or (b"",))
        self.left = asyncio.Event()
        self.sent: list[Any] = []
        self.started = asyncio.Event()

    async def receive(self) -> Any:
        if self._parts:
            return {"type": "http.request", "body": self._parts.pop(0), "more_body": bool(self._parts)}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self.started.set()

    async def ask(self, forwarder: Forwarder, leader: Leader) -> tuple[int, bytes]:
        async with asyncio.timeout(60):
            await forwarder.forward(leader.address, self.scope, self.receive, self.send)
        return self.sent[0]["status"], b"".join(message.get("body", b"") for message in self.sent[1:])


@pytest.fixture
async def forwarder() -> AsyncIterator[Forwarder]:
    made = Forwarder()
    yield made
    made.end()


async def test_requests_share_a_connection_and_arrive_unchanged(forwarder: Forwarder) -> None:
    """They use one connection in turn; hop-by-hop headers and those vouched for by a proxy are not forwarded."""
    async with leading() as leader:
        for _ in range(3):
            client = Client(headers=((b"connection", b"close"), (b"x-forwarded-user", b"ann"), (b"accept", b"*/*")))
            assert await client.ask(forwarder, leader) == (200, b"ok")
            assert (b"x-by", b"leader") in client.sent[0]["headers"]
    assert leader.connections == 1
    assert set(leader.heads) == {
        b"GET /a%20b?c=d HTTP/1.1\r\nhost: console\r\naccept: */*\r\ntrainmedic-handed-on: 1\r\n\r\n"
    }


async def test_a_chunked_body_is_forwarded_in_chunks(forwarder: Forwarder) -> None:
    """Its length is unknown beforehand; an empty chunk, which would end it, is omitted."""
    bodies: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bodies.append(await reader.readuntil(b"0\r\n\r\n"))
        writer.write(OK + b"ok")

    async with leading(answer) as leader:
        client = Client("POST", b"abc", b"", b"defg", b"", headers=((b"transfer-encoding", b"chunked"),))
        assert await client.ask(forwarder, leader) == (200, b"ok")
    assert bodies == [b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"]


async def test_head_has_a_length_and_no_body(forwarder: Forwarder) -> None:
    """The forwarder waits for nothing after the head."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)

    async with leading(answer) as leader:
        assert await Client("HEAD").ask(forwarder, leader) == (200, b"")


async def test_an_answer_before_the_end_of_the_body_reaches_the_client(forwarder: Forwarder) -> None:
    """An example is 413; the rest of the body is not sent, and the connection is not reused."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")

    async with leading(answer) as leader:
        parts = [b"x" * 4_000_000] * 8
        client = Client("POST", *parts, headers=((b"content-length", str(sum(map(len, parts))).encode()),))
        assert await client.ask(forwarder, leader) == (413, b"")
        assert await Client().ask(forwarder, leader) == (413, b"")
        assert leader.connections == 2


async def test_a_client_that_disconnects_frees_the_connection(forwarder: Forwarder) -> None:
    """It leaves an endless stream, or leaves before the answer starts."""

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"events" in leader.heads[-1]:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n")

    async with leading(stream) as leader:
        for accept in (b"text/event-stream, events", b"nothing"):
            client = Client(headers=((b"accept", accept),))
            asking = asyncio.create_task(client.ask(forwarder, leader))
            if b"events" in accept:
                await asyncio.wait_for(client.started.wait(), 60)
            client.left.set()
            with pytest.raises(ClientLeft):
                await asking
            await asyncio.wait_for(leader.gone.wait(), 60)
            leader.gone.clear()


async def test_open_streams_do_not_block_deliveries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams last for hours, and Alertmanager must not wait for one to end."""
    monkeypatch.setattr(forwarding, "_MOST_AT_ONCE", 3)
    monkeypatch.setattr(forwarding, "_MOST_READS", 2)
    monkeypatch.setattr(forwarding, "_TURN_SECONDS", 60)
    forwarder = Forwarder()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if leader.heads[-1].startswith(b"POST"):
            writer.write(OK + b"ok")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n: hello\n\n")

    async with leading(answer) as leader:
        pages = [Client(), Client(), Client()]
        asking = [asyncio.create_task(page.ask(forwarder, leader)) for page in pages]
        for page in pages[:2]:
            await asyncio.wait_for(page.started.wait(), 60)
        for _ in range(2):
            assert await Client("POST").ask(forwarder, leader) == (200, b"ok")
        pages[0].left.set()
        await asyncio.wait_for(pages[2].started.wait(), 60)
        for page in pages:
            page.left.set()
        await asyncio.wait(asking)
    forwarder.end()


async def test_a_slow_client_slows_the_leader(forwarder: Forwarder) -> None:
    """The forwarder reads no more of an answer than its buffer holds."""
    taken = asyncio.Event()
    most = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 64000000\r\n\r\n")
        for _ in range(64):
            writer.write(b"x" * 1_000_000)
            await writer.drain()
        taken.set()

    class Slow(Client):
        async def send(self, message: Any) -> None:
            nonlocal most
            most = max(most, len(message.get("body", b"")))
            await asyncio.sleep(0.001)
            await super().send(message)

    async with leading(answer) as leader:
        status, body = await Slow().ask(forwarder, leader)
        assert (status, len(body)) == (200, 64_000_000)
        assert taken.is_set()
        assert most < 4_000_000


async def test_a_truncated_answer_is_not_treated_as_complete(forwarder: Forwarder) -> None:
    """Before its head the client gets an error; after it, the caller leaves the answer unfinished."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc" if "begin" in str(leader.heads[-1]) else b"")
        writer.close()

    async with leading(answer) as leader:
        with pytest.raises(CutOff):
            await Client(headers=((b"x", b"begin"),)).ask(forwarder, leader)
        silent = Client()
        with pytest.raises(ConnectionError) as raised:
            await silent.ask(forwarder, leader)
        assert not isinstance(raised.value, CutOff)
        assert silent.sent == []


async def test_requests_pending_at_a_former_leader_are_released(forwarder: Forwarder) -> None:
    """`end` makes every client retry, and the forwarder continues with another leader."""

    async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()

    arrived = asyncio.Event()
    async with leading(silence) as hung, leading() as leader:
        asking = asyncio.create_task(Client().ask(forwarder, hung))
        await asyncio.wait_for(arrived.wait(), 60)
        forwarder.end()
        with pytest.raises(ConnectionError):
            await asking
        assert await Client().ask(forwarder, leader) == (200, b"ok")
