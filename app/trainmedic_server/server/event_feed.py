"""New events of the history, for all who listen: one poller, one short memory, no queue per client.

The poller asks the history while there are listeners, and keeps the newest events in a ring. A
listener says up to where it has read; what is still in the ring comes from there, what is older from
the history itself. So a listener can be as slow as it likes without costing memory, and replay and
live are one path with no seam at which an event could be missed or doubled. It relies on events
becoming visible in the order of ``seq``, which `History.events_after` promises.
"""

from __future__ import annotations

import asyncio
from collections import deque

from trainmedic_server import telemetry
from trainmedic_server.domain.run import Event
from trainmedic_server.errors import Saturated
from trainmedic_server.ports.store import History

BATCH = 500
_RING = 2_000
_RETRY_SECONDS = 2.0

log = telemetry.logger(__name__)


class EventFeed:
    """The events of `history`, as they are appended."""

    def __init__(self, history: History, poll_seconds: float, most_listeners: int, metrics: telemetry.Metrics) -> None:
        self._history = history
        self._poll_seconds = poll_seconds
        self._most_listeners = most_listeners
        self._metrics = metrics
        self._listeners = 0
        self._poller: asyncio.Task[None] | None = None
        self._ring: deque[Event] = deque()
        self._ring_begins_after: int | None = None
        """Every event with a larger seq, up to the newest polled, is in the ring; None before the first poll."""
        self._news = asyncio.Event()
        self._poke = asyncio.Event()
        self.closed = False

    def join(self) -> None:
        """Listen: the poller works until everyone has left. Raises Saturated."""
        if self._listeners >= self._most_listeners:
            raise Saturated("as many clients as are allowed listen to the events", retry_after=30)
        self._listeners += 1
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll(), name="events")

    async def leave(self) -> None:
        """Listen no longer."""
        self._listeners -= 1
        if self._listeners == 0:
            await self._stop()

    async def start_of(self, after: int | None) -> int:
        """Where a listener begins that has read up to `after`, or wants only what is new (None)."""
        newest = await self._history.last_seq()
        # A number that was never given out comes from before the store was replaced.
        return newest if after is None else min(after, newest)

    async def after(self, seq: int, wait_seconds: float) -> list[Event]:
        """The next events with a larger seq, in order, at most `BATCH`; none if none came in time."""
        news = self._news
        events = await self._read(seq)
        if not events and not self.closed:
            try:
                async with asyncio.timeout(wait_seconds):
                    await news.wait()
            except TimeoutError:
                return []
            events = await self._read(seq)
        return events

    def poke(self) -> None:
        """Something was appended: look now."""
        self._poke.set()

    async def close(self) -> None:
        """Let every listener end."""
        self.closed = True
        self._publish()
        await self._stop()

    async def _read(self, seq: int) -> list[Event]:
        if self._ring_begins_after is None or seq < self._ring_begins_after:
            return await self._history.events_after(seq, BATCH)
        newer: list[Event] = []
        for event in reversed(self._ring):
            if _seq(event) <= seq:
                break
            newer.append(event)
        newer.reverse()
        return newer[:BATCH]

    async def _poll(self) -> None:
        newest: int | None = None
        while True:
            wait = self._poll_seconds
            self._poke.clear()
            try:
                if newest is None:
                    newest = self._ring_begins_after = await self._history.last_seq()
                events = await self._history.events_after(newest, BATCH)
            except Exception as error:  # the loop goes on, whatever the store does
                self._metrics.loop_errors.labels("events").inc()
                log.warning("cannot read events", error=type(error).__name__)
                wait, events = _RETRY_SECONDS, []
            if events:
                newest = _seq(events[-1])
                self._remember(events)
                self._publish()
            if len(events) < BATCH:
                await self._pause(wait)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._poke.wait()
        except TimeoutError:
            pass

    def _remember(self, events: list[Event]) -> None:
        self._ring.extend(events)
        while len(self._ring) > _RING:
            self._ring_begins_after = _seq(self._ring.popleft())

    def _publish(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _stop(self) -> None:
        poller, self._poller = self._poller, None
        self._ring.clear()
        self._ring_begins_after = None
        if poller is not None:
            poller.cancel()
            await asyncio.wait({poller})


def _seq(event: Event) -> int:
    assert event.seq is not None, "the history gives events their seq"
    return event.seq
