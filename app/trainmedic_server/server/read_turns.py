"""Bounds how many readers of the history are served at one time, and how many wait.

Each page, run or export holds what it has read until it is written out, and writing it out takes the event loop's
time; so a few at a time are as fast as all at once, and hold up nobody else. Who calls it: ``history``, ``events``
and ``operations``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trainmedic_server.errors import Saturated


class ReadTurns:
    """Turns for up to `at_once` readers; up to `most_waiting` more wait for theirs."""

    def __init__(self, at_once: int, most_waiting: int, readers: str) -> None:
        self._turns = asyncio.Semaphore(at_once)
        self._most_waiting = most_waiting
        self._waiting = 0
        self._readers = readers

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Keep a turn until the block ends. Raises Saturated."""
        if self._turns.locked() and self._waiting >= self._most_waiting:
            raise Saturated(f"as many {self._readers} as are allowed are being read")
        self._waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._turns.release()
