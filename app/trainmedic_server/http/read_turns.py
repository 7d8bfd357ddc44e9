"""Limit on concurrent readers of the history, and selection of the next one.

Operators (callers with the right to act) precede viewers, but after `MOST_PASSED_OVER` in succession, a waiting viewer
is next. Of several turns, one is reserved for operators. Within each kind, names are served in rotation.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

from msgspec import Struct, field

from trainmedic_server.errors import Saturated

MOST_PASSED_OVER = 8


class ReadCaller(Struct, frozen=True):
    name: str
    acts: bool  # has the right to act


NOBODY = ReadCaller("", acts=True)  # caller of internal reads
_reader: ContextVar[ReadCaller] = ContextVar("reader", default=NOBODY)


def note_reader(name: str, *, acts: bool) -> None:
    _reader.set(ReadCaller(name, acts))


class _Waiting(Struct):
    by_name: dict[str, deque[asyncio.Future[None]]] = field(default_factory=dict)

    def add(self, name: str, turn: asyncio.Future[None]) -> None:
        self.by_name.setdefault(name, deque()).append(turn)

    def next(self) -> asyncio.Future[None] | None:
        while self.by_name:
            name = next(iter(self.by_name))
            turns = self.by_name.pop(name)
            turn = turns.popleft()
            if turns:
                self.by_name[name] = turns  # after the other names
            if not turn.done():
                return turn
        return None

    def count(self) -> int:
        return sum(not turn.done() for turns in self.by_name.values() for turn in turns)


class ReadTurns:
    def __init__(self, at_once: int, most_waiting: int, readers: str) -> None:
        """`readers` is a noun for errors. `most_waiting` applies to each kind of callers."""
        self._at_once = at_once
        self._for_viewers = max(1, at_once - 1)
        self._most_waiting = most_waiting
        self._readers = readers
        self._acting = self._viewing = 0  # readers with a turn
        self._passed_over = 0  # turns of operators in succession while a viewer waited
        self._waiting = {True: _Waiting(), False: _Waiting()}  # by `ReadCaller.acts`

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Wait for a turn and hold it during the block. Raises Saturated if too many wait."""
        reader = _reader.get()
        await self._begin(reader)
        try:
            yield
        finally:
            self._end(reader.acts)

    async def _begin(self, reader: ReadCaller) -> None:
        waiting = self._waiting[reader.acts]
        if self._is_free(reader.acts) and not waiting.count():
            self._count(reader.acts, 1)
            return
        if waiting.count() >= self._most_waiting:
            raise Saturated(f"too many {self._readers} are being read")
        turn = asyncio.get_running_loop().create_future()
        waiting.add(reader.name, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the turn was granted just before the cancellation
                self._end(reader.acts)
            raise

    def _end(self, acts: bool) -> None:
        self._count(acts, -1)
        while self._serve_next():
            continue

    def _serve_next(self) -> bool:
        """Return False if no turn is free or no reader waits."""
        viewers_first = self._passed_over >= MOST_PASSED_OVER
        for acts in (False, True) if viewers_first else (True, False):
            if self._is_free(acts) and (turn := self._waiting[acts].next()) is not None:
                self._passed_over = self._passed_over + 1 if acts and self._waiting[False].count() else 0
                self._count(acts, 1)
                turn.set_result(None)
                return True
        return False

    def _is_free(self, acts: bool) -> bool:
        has_place = self._acting + self._viewing < self._at_once
        return has_place and (acts or self._viewing < self._for_viewers)

    def _count(self, acts: bool, change: int) -> None:
        if acts:
            self._acting += change
        else:
            self._viewing += change
