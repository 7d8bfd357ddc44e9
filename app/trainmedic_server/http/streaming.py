"""Streaming of long responses in bounded memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class StreamedResponse(Response):
    """Sends `chunks` until they end, the client disconnects, or reads nothing for `stall_seconds`. Always calls
    `on_close`.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        media_type: str,
        stall_seconds: float,
        on_close: Callable[[], Awaitable[None]],
    ) -> None:
        # The base's constructor would set a length.
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.body = b""
        self.init_headers({"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._on_close = on_close
        self._chunks = chunks
        self._stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.create_task(self._write(send))
        watcher = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({writer, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Shielded: a second cancellation, while the writer ends, must not prevent `on_close`.
            await asyncio.shield(self._end(writer, watcher))
        if not writer.cancelled():
            await writer  # raises the writer's error, if any

    async def _end(self, *tasks: asyncio.Task[None]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self._on_close()

    async def _write(self, send: Send) -> None:
        try:
            await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self._chunks:
                await self._send(send, {"type": "http.response.body", "body": chunk, "more_body": True})
                # Sending suspends only for a slow client. This lets other tasks run, such as the watcher.
                await asyncio.sleep(0)
            await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._chunks.aclose()

    async def _send(self, send: Send, message: dict[str, object]) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds):
                await send(message)
        except TimeoutError:
            raise ClientStalled from None


async def while_allowed(chunks: AsyncGenerator[bytes, None], is_allowed: Callable[[], bool]) -> AsyncGenerator[bytes]:
    """Yield chunks while `is_allowed`, checked at each, also at keep-alives."""
    try:
        async for chunk in chunks:
            if not is_allowed():
                return
            yield chunk
    finally:
        await chunks.aclose()


class ClientStalled(Exception):
    """The client of a stream does not read it."""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
