"""Cancellation of reads whose client has disconnected. Requests that change something are never cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import Message, Receive, Scope, Send

Answer = Callable[[Scope, Receive, Send], Awaitable[None]]

_GRACE_SECONDS = 1.0  # for an answer that detects the disconnect itself
_READS = frozenset({"GET", "HEAD"})


async def while_client_waits(answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http" or scope["method"] not in _READS:
        await answer(scope, receive, send)
        return
    messages = _ClientMessages(receive)
    answering = asyncio.ensure_future(answer(scope, messages.next, send))
    listening = asyncio.create_task(messages.listen())
    try:
        await asyncio.wait({answering, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            await asyncio.wait({answering}, timeout=_GRACE_SECONDS)
    finally:
        listening.cancel()
        was_answered = answering.done()
        answering.cancel()
        await asyncio.wait({answering, listening})
    if was_answered or not answering.cancelled():
        await answering  # raises its error, if any


class _ClientMessages:
    """Messages of the client, at most two read ahead to bound memory, and an event for its disconnect."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: asyncio.Queue[Message] = asyncio.Queue(1)
        self._left = asyncio.Event()

    async def listen(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._left.set()
                return
            await self._messages.put(message)

    async def next(self) -> Message:
        if self._messages.empty():
            arrives, leaves = asyncio.ensure_future(self._messages.get()), asyncio.ensure_future(self._left.wait())
            try:
                await asyncio.wait({arrives, leaves}, return_when=asyncio.FIRST_COMPLETED)
                if not arrives.done():
                    return {"type": "http.disconnect"}
                return arrives.result()
            finally:
                arrives.cancel()
                leaves.cancel()
        return self._messages.get_nowait()
