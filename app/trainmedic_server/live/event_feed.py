"""Feed of new history events: one poller and one ring buffer for all listeners.

This relies on events becoming visible in the order of ``seq``.
"""

from __future__ import annotations

import asyncio
from collections import deque

from trainmedic_server import telemetry
from trainmedic_server.domain.run import Event
from trainmedic_server.errors import Saturated, StoreUnavailable
from trainmedic_server.ports.store import History

BATCH = 100  # events of one read
_RING = 2_000  # events
_REPLAYS = 2  # Listeners that read from the history at one time, to limit the delay of other requests
_RETRY_SECONDS = 2.0  # after an error of the store

log = telemetry.logger(__name__)


class EventFeed:
    def __init__(self, history: History, poll_seconds: float, most_listeners: int, metrics: telemetry.Metrics) -> None:
        self._history = history
        self._poll_seconds = poll_seconds
        self._most_listeners = most_listeners
        self._metrics = metrics
        self._listeners = 0
        self._poller: asyncio.Task[None] | None = None
        self._ring: deque[Event] = deque()
        # The ring has every event with a larger seq, up to the newest polled. None before the first poll.
        self._ring_begins_after: int | None = None
        # One asyncio.Event per publication: `_publish` sets it and replaces it. It never has to be cleared, and no
        # waiter can miss it.
        self._published = asyncio.Event()
        self._replays = asyncio.Semaphore(_REPLAYS)
        self.closed = False
        self.is_down = False  # True if the store did not answer the last poll

    def join(self) -> None:
        """Add a listener. The poller runs until the last one leaves. Raises Saturated."""
        if self._listeners >= self._most_listeners:
            raise Saturated("too many clients listen to the events", retry_after=30)
        self._listeners += 1
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll(), name="events")

    async def leave(self) -> None:
        self._listeners -= 1
        if self._listeners == 0:
            await self._stop()

    async def start_of(self, after: int | None) -> int:
        """Return the seq after which a listener begins. `after` is its last event, None for new events only."""
        newest = await self._history.last_seq()
        # A larger seq than the newest is from before the store was replaced. Its listener would wait until the new
        # store had counted that far.
        return newest if after is None else min(after, newest)

    async def after(self, seq: int, wait_seconds: float) -> list[Event]:
        """Return the next events with a larger seq, at most `BATCH`; none after `wait_seconds` or `close`."""
        published = self._published  # taken before the read, so that an event published during it ends the wait
        events = await self._read(seq)
        if not events and not self.closed:
            try:
                async with asyncio.timeout(wait_seconds):
                    await published.wait()
            except TimeoutError:
                return []
            events = await self._read(seq)
        return events

    async def close(self) -> None:
        self.closed = True
        self._publish()
        await self._stop()

    async def _read(self, seq: int) -> list[Event]:
        if self._ring_begins_after is None or seq < self._ring_begins_after:
            async with self._replays:
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
            try:
                if newest is None:
                    newest = self._ring_begins_after = await self._history.last_seq()
                events = await self._history.events_after(newest, BATCH)
                self.is_down = False
            except StoreUnavailable as error:
                log.warning("cannot read events", error=str(error))
                wait, events, self.is_down = _RETRY_SECONDS, [], True
            except Exception:  # keep polling: open streams outlive a bug
                self._metrics.loop_errors.labels("events").inc()
                log.exception("cannot read events")
                wait, events = _RETRY_SECONDS, []
            if events:
                newest = _seq(events[-1])
                self._remember(events)
                self._publish()
            if len(events) < BATCH:
                await asyncio.sleep(wait)

    def _remember(self, events: list[Event]) -> None:
        self._ring.extend(events)
        while len(self._ring) > _RING:
            self._ring_begins_after = _seq(self._ring.popleft())

    def _publish(self) -> None:
        published, self._published = self._published, asyncio.Event()
        published.set()

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
