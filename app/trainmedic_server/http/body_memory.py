"""Memory budgets for arriving small and large bodies, and turns to parse them.

If a budget is full, the body arriving longest is dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque

from trainmedic_server.http.limits import ServerLimits


class BodyArrival:
    """A body in memory. While it arrives, `deadline` can be brought forward, which sets ``gave_way``.

    A body that had arrived with its request has no deadline.
    """

    def __init__(self) -> None:
        self.deadline: asyncio.Timeout | None = None
        self.size = 0
        self.gave_way = False


class BodyMemory:
    def __init__(self, limits: ServerLimits) -> None:
        self._small_body_bytes = limits.small_body_bytes
        self._small = _Budget(limits.small_bytes, Turns(limits.parsed_bytes))
        # Every large body exceeds 1 byte, so they are parsed one by one.
        self._large = _Budget(limits.large_bytes, Turns(1))

    def grow(self, arrival: BodyArrival, size: int) -> bool:
        """Reserve `size` more bytes. Return False if the budget is full and no body arriving longer can be dropped, or
        this one was: its end can arrive before its deadline fires.
        """
        if arrival.gave_way:
            return False
        before, after = self._budget(arrival.size), self._budget(arrival.size + size)
        if before is not after:
            before.remove(arrival)
        after.arriving.setdefault(arrival)
        arrival.size += size
        after.in_use += size if before is after else arrival.size
        while after.in_use > after.limit:
            oldest = next(iter(after.arriving))
            if oldest is arrival:
                return False
            after.remove(oldest)
            oldest.size, oldest.gave_way = 0, True
            assert oldest.deadline is not None  # a body without one arrives in a single run of the event loop
            if not oldest.deadline.expired():  # else its task is about to end
                oldest.deadline.reschedule(asyncio.get_running_loop().time())
        return True

    def arrived(self, arrival: BodyArrival) -> Turns:
        """Protect the complete body from being dropped. Return the turns to parse it."""
        budget = self._budget(arrival.size)
        budget.arriving.pop(arrival, None)
        return budget.turns

    def release(self, arrival: BodyArrival) -> None:
        self._budget(arrival.size).remove(arrival)
        arrival.size = 0

    def _budget(self, size: int) -> _Budget:
        return self._small if size <= self._small_body_bytes else self._large


class _Budget:
    """Memory of bodies until their reply. Arriving ones are in order of entry."""

    def __init__(self, limit: int, turns: Turns) -> None:
        self.limit = limit
        self.turns = turns
        self.in_use = 0
        self.arriving: dict[BodyArrival, None] = {}

    def remove(self, arrival: BodyArrival) -> None:
        self.in_use -= arrival.size
        self.arriving.pop(arrival, None)


class Turns:
    """Admits callers in order while their sizes sum to at most `limit`. A larger one is admitted alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_use = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        if not self._waiting and self._fits(size):
            self._in_use += size
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(size)
            raise

    def _fits(self, size: int) -> bool:
        return self._in_use == 0 or self._in_use + size <= self._limit

    def give_back(self, size: int) -> None:
        self._in_use -= size
        while self._waiting and (self._waiting[0][1].cancelled() or self._fits(self._waiting[0][0])):
            waiting_size, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._in_use += waiting_size
                turn.set_result(None)
