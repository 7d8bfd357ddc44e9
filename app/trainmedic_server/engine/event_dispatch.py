"""Ordered, at-least-once delivery of history events to listeners.

A listener's stored position advances after it has taken the events. New listeners start at the present.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Protocol

from trainmedic.wire.backoff import Backoff
from trainmedic_server import telemetry
from trainmedic_server.domain.run import Event
from trainmedic_server.engine import loops
from trainmedic_server.engine.loops import Sleep
from trainmedic_server.ports.store import History, RunStore, Transaction

_LOOK_EVERY = timedelta(seconds=1)
_FIRST_RETRY, _LONGEST_RETRY = 1.0, 30.0  # seconds


class EventListener(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def kinds(self) -> Collection[str]:
        """Empty for all."""
        ...

    @property
    def at_once(self) -> int:
        """Most events of a call."""
        ...

    async def take(self, events: Sequence[Event]) -> None:
        """Take events in order, possibly repeated. Raises TrainmedicError to get them again."""
        ...


class EventDispatcher:
    def __init__(
        self,
        store: RunStore,
        source: History,
        listener: EventListener,
        metrics: telemetry.Metrics,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._store = store
        self._source = source
        self._listener = listener
        self._metrics = metrics
        self._sleep = sleep
        self._position: int | None = None

    async def run(self) -> None:
        retries = Backoff(_FIRST_RETRY, _LONGEST_RETRY)
        await loops.repeat(
            self.tell, _LOOK_EVERY, self._listener.name, self._metrics, retries=retries, sleep=self._sleep
        )

    async def tell(self) -> int:
        """Deliver the next events and return their number. Raises TrainmedicError."""
        before, newest = await self.begin(), await self._source.last_seq()
        if newest <= before:
            return 0
        listener = self._listener
        events = await self._source.events_after(before, listener.at_once, listener.kinds)
        if events:
            try:
                await listener.take(events)
            except Exception:
                self._metrics.event_errors.labels(listener.name).inc()
                raise
        last = events[-1].seq if events else None
        # If fewer came than were asked for, all others up to the newest are of kinds that it does not take.
        taken = last if last is not None and len(events) == listener.at_once else max(newest, last or 0)
        await self._store.transact(lambda tx: tx.event_positions.save_position(listener.name, taken))
        self._position = taken
        return len(events)

    async def begin(self) -> int:
        """Load or create the listener's position; later events are certainly delivered. Raises StoreUnavailable."""
        if self._position is None:
            newest = await self._source.last_seq()
            self._position = await self._store.transact(lambda tx: self._stored_or(newest, tx))
        return self._position

    def _stored_or(self, newest: int, tx: Transaction) -> int:
        name = self._listener.name
        kept = tx.event_positions.position(name)
        # A position after the newest event stems from a replaced store.
        if kept is None or kept > newest:
            tx.event_positions.save_position(name, newest)
            return newest
        return kept
