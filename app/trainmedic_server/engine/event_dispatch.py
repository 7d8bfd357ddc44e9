"""Hands the events of the history, in order, to somebody who does something with each: at least once, over restarts.

Up to where a listener has come stands in the run store, and moves on when it has taken the events. So an outage of
whoever it tells, or a kill of the server, loses nothing, and holds up no run: each listener has a loop of its own that
reads what is committed. A listener that has never listened begins with what happens from then on.

Who calls it: ``wiring`` runs one for each listener.
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
from trainmedic_server.engine.loops import Rest
from trainmedic_server.ports.store import RunStore, Transaction

_LOOK_EVERY = timedelta(seconds=1)
_FIRST_RETRY, _LONGEST_RETRY = 1.0, 30.0


class EventListener(Protocol):
    """Does something with each event."""

    @property
    def name(self) -> str:
        """By which its position is kept."""
        ...

    @property
    def kinds(self) -> Collection[str]:
        """Of which kinds the events are that it is handed; of all where this is empty."""
        ...

    @property
    def at_once(self) -> int:
        """How many events it is handed at one time, at most: so many are taken twice after a kill."""
        ...

    async def take(self, events: Sequence[Event]) -> None:
        """Take events, in order, each of which may be taken again. Raises TrainmedicError: they are handed again."""
        ...


class EventSource(Protocol):
    """Reads the events; `ports.store.History` does."""

    async def events_after(self, seq: int, limit: int, kinds: Collection[str] = ()) -> list[Event]: ...
    async def last_seq(self) -> int: ...


class EventDispatcher:
    """Hands events to one listener."""

    def __init__(
        self,
        store: RunStore,
        source: EventSource,
        listener: EventListener,
        metrics: telemetry.Metrics,
        rest: Rest = asyncio.sleep,
    ) -> None:
        self._store = store
        self._source = source
        self._listener = listener
        self._metrics = metrics
        self._rest = rest
        self._position: int | None = None

    async def run(self) -> None:
        """Hand on what is new, until cancelled."""
        retries = Backoff(_FIRST_RETRY, _LONGEST_RETRY)
        await loops.repeat(self.tell, _LOOK_EVERY, self._listener.name, self._metrics, retries=retries, rest=self._rest)

    async def tell(self) -> int:
        """Hand on the next events once; return how many those were. Raises TrainmedicError."""
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
        # Of other kinds there may have been more, up to the newest event that was there before these were read.
        taken = last if last is not None and len(events) == listener.at_once else max(newest, last or 0)
        await self._store.transact(lambda tx: tx.event_positions.save_position(listener.name, taken))
        self._position = taken
        return len(events)

    async def begin(self) -> int:
        """Find the position from which on there is to tell, if it is not known yet, and return it: what comes after the
        first call is told, whatever happens. Raises StoreUnavailable."""
        if self._position is None:
            newest = await self._source.last_seq()
            self._position = await self._store.transact(lambda tx: self._kept_or(newest, tx))
        return self._position

    def _kept_or(self, newest: int, tx: Transaction) -> int:
        name = self._listener.name
        kept = tx.event_positions.position(name)
        # One beyond the newest event dates from before the store was replaced.
        if kept is None or kept > newest:
            tx.event_positions.save_position(name, newest)
            return newest
        return kept
