"""Reads end when their client leaves; what acts does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from trainmedic_server.http import client_presence
from trainmedic_server.http.client_presence import while_client_waits
from trainmedic_server.http.streaming import StreamedResponse

Message = dict[str, Any]
WHOLE = {"type": "http.request", "body": b"", "more_body": False}
LEFT = {"type": "http.disconnect"}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_presence, "_GRACE_SECONDS", 0.01)


class Client:
    """Sends a whole request, and leaves when it is told to."""

    def __init__(self, *messages: Message) -> None:
        self.messages = list(messages or (WHOLE,))
        self.leaves = asyncio.Event()
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        if self.messages:
            return self.messages.pop(0)
        await self.leaves.wait()
        return LEFT

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def ask(self, answer: Callable[..., Awaitable[None]], method: str = "GET") -> None:
        async with asyncio.timeout(60):
            await while_client_waits(answer, {"type": "http", "method": method}, self.receive, self.send)  # type: ignore[arg-type]


async def test_a_read_that_nobody_waits_for_is_cancelled() -> None:
    """Its own clean-up runs, so turns and connections come back."""
    client, ended = Client(), []

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        client.leaves.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    await client.ask(slow)
    assert ended == ["cancelled"]


async def test_a_stream_that_ends_slowly_is_closed_all_the_same() -> None:
    """Its source takes longer than the grace: the second cancellation keeps no turn for ever."""
    client, ended = Client(), []
    closed = asyncio.Event()

    async def lines() -> AsyncGenerator[bytes, None]:
        try:
            yield b"line"
            client.leaves.set()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            ended.append("source")

    async def close() -> None:
        ended.append("turn")
        closed.set()

    await client.ask(StreamedResponse(lines(), "text/plain", 30, close))
    async with asyncio.timeout(5):
        await closed.wait()
    assert ended == ["source", "turn"]


async def test_what_acts_is_carried_out_though_its_client_left() -> None:
    """An approval counts once it was sent."""
    client, done = Client(), []

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        client.leaves.set()
        await asyncio.sleep(0.05)
        done.append(True)

    await client.ask(slow, "POST")
    assert done == [True]


async def test_an_answer_and_an_error_come_through() -> None:
    """While the client is there nothing is different."""
    client = Client()

    async def good(scope: Any, receive: Any, send: Any) -> None:
        assert await receive() == WHOLE
        await send({"type": "http.response.start"})

    async def bad(scope: Any, receive: Any, send: Any) -> None:
        raise LookupError("of the answer's own")

    await client.ask(good)
    assert client.sent == [{"type": "http.response.start"}]
    with pytest.raises(LookupError):
        await client.ask(bad)


async def test_an_answer_that_listens_itself_hears_that_its_client_left() -> None:
    """A stream ends in its own way, and is told as often as it asks."""
    client = Client()
    heard: list[Message] = []

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        heard.append(await receive())
        client.leaves.set()
        heard.extend([await receive(), await receive()])

    await client.ask(stream)
    assert heard == [WHOLE, LEFT, LEFT]


async def test_a_client_cannot_fill_the_memory() -> None:
    """What nobody reads is not read ahead by more than two messages."""
    client = Client(*({"type": "http.request", "body": b"x", "more_body": True} for _ in range(50)))

    async def idle(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    await client.ask(idle)
    assert len(client.messages) >= 48


async def test_a_request_that_is_ended_from_outside_ends_its_answer() -> None:
    """As when the server stops."""
    client, ended = Client(), []

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    asking = asyncio.create_task(client.ask(slow))
    await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert ended == [True]
