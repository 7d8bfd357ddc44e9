"""Hands the events of the history, in order, to somebody who does something with each: at least once, over restarts.

Up to where a listener has come stands in the run store, and moves on when it has taken the events. So an outage of
whoever it tells, or a kill of the server, loses nothing, and holds up no run: each listener has a loop of its own that
reads what is committed. A listener that has never listened begins with what happens from then on.

Who calls it: ``wiring`` runs one for each listener.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from trainmedic_server import errors, telemetry
from trainmedic_server.domain.run import Event
from trainmedic_server.ports.store import RunStore, Transaction

_LOOK_EVERY = timedelta(seconds=1)
_LAST_RETRY = timedelta(seconds=30)

log = telemetry.logger(__name__)


class EventListener(Protocol):
    """Does something with each event."""

    @property
    def name(self) -> str:
        """By which its position is kept."""
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

    async def events_after(self, seq: int, limit: int) -> list[Event]: ...
    async def last_seq(self) -> int: ...


class EventTeller:
    """Hands events to one listener."""

    def __init__(
        self, store: RunStore, source: EventSource, listener: EventListener, metrics: telemetry.Metrics
    ) -> None:
        self._store = store
        self._source = source
        self._listener = listener
        self._metrics = metrics
        self._position: int | None = None
        self._failures = 0

    async def run(self) -> None:
        """Hand on what is new, until cancelled."""
        while True:
            wait = _LOOK_EVERY
            try:
                while await self.tell():
                    pass
            except errors.TrainmedicError as error:
                wait = self._note_failure(str(error))
            except Exception as error:  # the loop's boundary: one event must not end the telling of others
                self._metrics.loop_errors.labels(self._listener.name).inc()
                log.exception("handing on events failed; trying again", listener=self._listener.name)
                wait = self._note_failure(type(error).__name__)
            await asyncio.sleep(wait.total_seconds())

    async def tell(self) -> int:
        """Hand on the next events once; return how many those were. Raises TrainmedicError."""
        name = self._listener.name
        if self._position is None:
            self._position = await self._begin(name)
        events = await self._source.events_after(self._position, self._listener.at_once)
        if not events:
            return 0
        await self._listener.take(events)
        taken = events[-1].seq
        assert taken is not None, "the history gives events their seq"
        await self._store.transact(lambda tx: tx.event_positions.save_position(name, taken))
        self._position = taken
        if self._failures:
            self._failures = 0
            log.info("events are taken again", listener=name)
        return len(events)

    async def _begin(self, name: str) -> int:
        """The position that is kept, or the newest event's, which is kept then."""
        newest = await self._source.last_seq()

        def position(tx: Transaction) -> int:
            kept = tx.event_positions.position(name)
            # One beyond the newest event dates from before the store was replaced.
            if kept is None or kept > newest:
                tx.event_positions.save_position(name, newest)
                return newest
            return kept

        return await self._store.transact(position)

    def _note_failure(self, reason: str) -> timedelta:
        self._metrics.event_errors.labels(self._listener.name).inc()
        if not self._failures:
            log.warning("events are not taken; trying again", listener=self._listener.name, error=reason)
        self._failures += 1
        return min(timedelta(seconds=2 ** min(self._failures - 1, 10)), _LAST_RETRY)
