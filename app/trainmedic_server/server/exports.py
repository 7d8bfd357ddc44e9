"""The whole filtered history as one stream: NDJSON or CSV, a few streams at a time. Who calls it: ``history``."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

from fastapi import Response

from trainmedic_server.domain.plain_text import csv_cell
from trainmedic_server.domain.run import Run
from trainmedic_server.ports.store import History, HistoryFilter
from trainmedic_server.server import views
from trainmedic_server.server.limits import KIB, ServerLimits
from trainmedic_server.server.read_turns import ReadTurns
from trainmedic_server.server.streaming import StreamedResponse

NDJSON = "application/x-ndjson"
CSV = "text/csv"
_CHUNK_BYTES = 16 * KIB  # written at one go, between which other requests have their turn
_COLUMNS = tuple(views.HistoryItem.model_fields)


class HistoryExports:
    """Streams runs, as many streams at one time as `limits` says."""

    def __init__(self, history: History, limits: ServerLimits) -> None:
        self._history = history
        self._stall_seconds = limits.stall_seconds
        self._turns = ReadTurns(limits.exports, 0, "exports")

    async def response(self, conditions: HistoryFilter, media_type: str) -> Response:
        """The stream of the runs that meet `conditions`. Raises Saturated, StoreUnavailable.

        The first run is fetched before anything is sent, so that a store that does not answer still leads to a 503.
        """
        write = _WRITERS[media_type]
        await self._turns.acquire()
        runs = self._history.stream(conditions)
        try:
            first = await anext(runs, None)
        except BaseException:
            self._turns.release()
            raise
        if first is None:
            self._turns.release()
            return Response(write(None), media_type=media_type)

        async def stop() -> None:
            self._turns.release()
            if isinstance(runs, AsyncGenerator):
                await runs.aclose()

        return StreamedResponse(_chunks(first, runs, write), media_type, self._stall_seconds, stop)


async def _chunks(
    first: Run, others: AsyncIterator[Run], write: Callable[[Run | None], bytes]
) -> AsyncGenerator[bytes, None]:
    """The runs as `write` makes them, after the header, which it makes of None."""
    buffer = [write(None), write(first)]
    size = 0
    async for run in others:
        buffer.append(write(run))
        size += len(buffer[-1])
        if size >= _CHUNK_BYTES:
            yield b"".join(buffer)
            buffer, size = [], 0
    yield b"".join(buffer)


def _ndjson(run: Run | None) -> bytes:
    return b"" if run is None else views.one_line(views.item(run)) + b"\n"


def _csv(run: Run | None) -> bytes:
    """The run as a CSV record (RFC 4180); the header where `run` is None."""
    cells: list[str] = list(_COLUMNS)
    if run is not None:
        members = views.item(run).model_dump(mode="json")
        cells = [csv_cell(members[column]) for column in _COLUMNS]
    record = io.StringIO()
    csv.writer(record, lineterminator="\r\n").writerow(cells)
    return record.getvalue().encode()


_WRITERS: Mapping[str, Callable[[Run | None], bytes]] = {NDJSON: _ndjson, CSV: _csv}
