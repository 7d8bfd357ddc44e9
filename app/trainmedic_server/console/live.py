"""Live updates of open pages: HTML fragments as server-sent events, rendered once for all viewers.

A reconnecting listener gets what it missed, or reloads the page.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping

from msgspec import Struct

from trainmedic_server import telemetry
from trainmedic_server.domain.run import Event
from trainmedic_server.errors import Saturated, StoreUnavailable, TrainmedicError
from trainmedic_server.http.limits import ServerLimits
from trainmedic_server.live.event_feed import EventFeed

STILL_HERE = b"event: here\ndata: {}\n\n"  # unlike a comment, scripts see it, and notice its absence
Render = Callable[[str, Collection[str], int], Awaitable[Mapping[str, str]]]
"""Arguments: topic, IDs of runs with events, newest event. Returns fragments by element ID."""
MOST_TOPICS = 8  # of one page
_KEPT_PIECES = 400  # for pages that connect again
_BETWEEN_SECONDS = 0.2  # limits the cost of a storm
_RETRY_SECONDS = 2.0  # after a failed rendering
_RETRY_MILLISECONDS = 2000  # of browsers, until they connect again

log = telemetry.logger(__name__)


class Piece(Struct, frozen=True):
    seq: int
    topic: str
    line: bytes


class LiveBoard:
    def __init__(self, feed: EventFeed, render: Render, limits: ServerLimits, metrics: telemetry.Metrics) -> None:
        self._feed = feed
        self._render = render
        self._limits = limits
        self._metrics = metrics
        self._wanted: Counter[str] = Counter()
        self._since: dict[str, int] = {}
        """For each wanted topic, the event after which all its fragments were kept or sent."""
        self._viewers = 0
        self._pieces: deque[Piece] = deque(maxlen=_KEPT_PIECES)
        self._begins_after = 0  # all fragments for later events are kept
        self._seq = 0  # newest event that was sent completely
        self._taken = 0
        """Newest event in rendering or rendered. New listeners may miss its fragments."""
        self._published = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()  # set once the reader knows `_taken`, or has failed

    async def join(self, topics: Collection[str]) -> None:
        if self._viewers >= self._limits.viewers:
            raise Saturated("too many live pages are open", retry_after=30)
        self._viewers += 1
        self._wanted.update(topics)
        if self._reader is None:
            try:
                self._feed.join()
            except Saturated:
                self._forget_viewer(topics)
                raise
            self._begun = asyncio.Event()
            self._reader = asyncio.create_task(self._read(self._begun), name="console")
        try:
            await self._begun.wait()
        except asyncio.CancelledError:  # the client has disconnected
            await self.leave(topics)
            raise
        for topic in topics:
            self._since.setdefault(topic, self._taken)

    async def leave(self, topics: Collection[str]) -> None:
        """The reader ends with the last listener."""
        self._forget_viewer(topics)
        if self._viewers == 0 and self._reader is not None:
            reader, self._reader = self._reader, None
            reader.cancel()
            await asyncio.wait({reader})
            self._pieces.clear()
            await self._feed.leave()

    async def lines(self, after: int, topics: frozenset[str]) -> AsyncGenerator[bytes, None]:
        """Yield the fragments of a listener's topics for events after `after`."""
        clock = asyncio.get_running_loop().time
        position, sent_at = after, clock()
        yield f"retry: {_RETRY_MILLISECONDS}\n\n".encode()
        is_unknown = after == 0 and self._feed.is_down  # the page was made while the store did not answer
        while is_unknown and self._feed.is_down and not self._feed.closed:
            await asyncio.sleep(_RETRY_SECONDS)
            yield STILL_HERE
        complete_after = max(self._since.get(topic, self._taken) for topic in topics)
        while not self._feed.closed:
            published = self._published
            # Checked each time: the reader may begin only now, or this listener may be too slow.
            complete_after = max(complete_after, self._begins_after)
            if position < complete_after or is_unknown:
                # Fragments of earlier events are missing; reloading the page shows everything.
                position, is_unknown = complete_after, False
                yield b"id: %d\nevent: reload\ndata: {}\n\n" % position
            chosen = [piece for piece in self._pieces if position < piece.seq <= self._seq and piece.topic in topics]
            position = max(position, self._seq)
            if chosen:
                yield b"".join(piece.line for piece in chosen)
                sent_at = clock()
                continue
            wait = max(0.0, sent_at + self._limits.heartbeat_seconds - clock())
            try:
                async with asyncio.timeout(wait):
                    await published.wait()
            except TimeoutError:
                yield STILL_HERE
                sent_at = clock()

    def _forget_viewer(self, topics: Collection[str]) -> None:
        self._viewers -= 1
        self._wanted.subtract(topics)
        self._wanted += Counter()  # drops topics without listeners
        self._since = {topic: seq for topic, seq in self._since.items() if topic in self._wanted}

    async def _read(self, begun: asyncio.Event) -> None:
        position: int | None = None
        while not self._feed.closed:
            try:
                if position is None:
                    position = self._seq = self._taken = self._begins_after = await self._feed.start_of(None)
                    begun.set()
                    self._notify_viewers()  # of the beginning, if the first tries failed
                events = await self._feed.after(position, self._limits.heartbeat_seconds)
                if events:
                    await self._publish(events)
                    position = self._seq
                    await asyncio.sleep(_BETWEEN_SECONDS)
            except (StoreUnavailable, TrainmedicError) as error:
                log.warning("cannot update open pages", error=type(error).__name__)
                await asyncio.sleep(_RETRY_SECONDS)
            except Exception:  # keep running: open pages outlive a failed rendering
                self._metrics.loop_errors.labels("console").inc()
                log.exception("cannot update open pages")
                await asyncio.sleep(_RETRY_SECONDS)
            finally:
                begun.set()
        self._notify_viewers()

    async def _publish(self, events: list[Event]) -> None:
        self._taken = seq = events[-1].seq or self._seq
        run_ids = {event.run_id for event in events if event.run_id is not None}
        for topic in list(self._wanted):
            if topic.startswith("run:") and topic.removeprefix("run:") not in run_ids:
                continue
            pieces = await self._render(topic, run_ids, seq)
            if pieces:
                data = json.dumps(pieces, separators=(",", ":"))
                line = f"id: {seq}\nevent: {topic.partition(':')[0]}\ndata: {data}\n\n".encode()
                self._remember(Piece(seq, topic, line))
        self._seq = seq
        self._notify_viewers()

    def _remember(self, piece: Piece) -> None:
        if len(self._pieces) == self._pieces.maxlen:
            self._begins_after = self._pieces[0].seq
        self._pieces.append(piece)

    def _notify_viewers(self) -> None:
        published, self._published = self._published, asyncio.Event()
        published.set()
