"""Export of a whole filtered list as a stream of NDJSON or CSV."""

from __future__ import annotations

import asyncio
import csv
import io
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Header, Response

from trainmedic_core.plain_text import csv_cell
from trainmedic_server.api import views
from trainmedic_server.api.view import View
from trainmedic_server.http.limits import KIB, ServerLimits
from trainmedic_server.http.negotiation import preferred
from trainmedic_server.http.read_turns import ReadTurns
from trainmedic_server.http.streaming import StreamedResponse

NDJSON = "application/x-ndjson"
CSV = "text/csv"
_TEXT = {"schema": {"type": "string"}}
AS_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": dict.fromkeys((NDJSON, CSV), _TEXT)}}
_CHUNK_BYTES = 16 * KIB  # written at once; other requests run between two chunks
Item = TypeVar("Item")
Accept = Annotated[str | None, Header(include_in_schema=False)]


def stream_type(accept: str | None) -> str | None:
    """Return the media type of the stream that the client prefers to a page, else None."""
    kind = preferred(accept, ("application/json", NDJSON, CSV))
    return None if kind == "application/json" else kind


class Exports(Generic[Item]):
    def __init__(self, limits: ServerLimits, model: type[View], view: Callable[[Item], View]) -> None:
        self._columns = tuple(model.model_fields)
        self._view = view
        self._stall_seconds = limits.stall_seconds
        self._turns = ReadTurns(limits.exports, 0, "exports")  # none waits: a surplus one is refused

    async def response(self, items: AsyncIterator[Item], media_type: str) -> Response:
        """Return the stream of `items`. Raises Saturated, StoreUnavailable.

        The first item is fetched before anything is sent, so that a store failure becomes a 503.
        """
        write = {NDJSON: self._ndjson, CSV: self._csv}[media_type]
        async with AsyncExitStack() as until_closed:
            await until_closed.enter_async_context(self._turns.take())
            if isinstance(items, AsyncGenerator):
                until_closed.push_async_callback(items.aclose)
            first = await anext(items, None)
            if first is None:
                return Response(write(None), media_type=media_type)
            chunks, stop = _chunks(first, items, write), until_closed.pop_all().aclose
            return StreamedResponse(chunks, media_type, self._stall_seconds, stop)

    def _ndjson(self, item: Item | None) -> bytes:
        return b"" if item is None else views.one_line(self._view(item)) + b"\n"

    def _csv(self, item: Item | None) -> bytes:  # None: the header
        cells: list[str] = list(self._columns)
        if item is not None:
            members = self._view(item).model_dump(mode="json")
            cells = [csv_cell(members[column]) for column in self._columns]
        record = io.StringIO()
        csv.writer(record, lineterminator="\r\n").writerow(cells)
        return record.getvalue().encode()


async def _chunks(
    first: Item, others: AsyncIterator[Item], write: Callable[[Item | None], bytes]
) -> AsyncGenerator[bytes, None]:
    """Pause after each chunk for as long as it took, for the sake of deliveries."""
    buffer = [write(None), write(first)]  # `write(None)` is the header
    size, began = 0, time.monotonic()
    async for item in others:
        buffer.append(write(item))
        size += len(buffer[-1])
        if size >= _CHUNK_BYTES:
            took = time.monotonic() - began
            yield b"".join(buffer)
            await asyncio.sleep(took)
            buffer, size, began = [], 0, time.monotonic()
    yield b"".join(buffer)
