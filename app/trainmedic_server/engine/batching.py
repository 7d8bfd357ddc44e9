"""Batching of concurrent requests, such as deliveries in one transaction.

A lone caller never waits for more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

from msgspec import Struct

from trainmedic_server import errors
from trainmedic_server.ports.ending import end_tasks

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Watch: TypeAlias = Callable[[int, float, float], None]
"""Called with a batch's size, the seconds its oldest entry waited, and the seconds of handling."""


class _Waiting(Struct, Generic[Asked, Answer], frozen=True, eq=False):
    entry: Asked
    answer: asyncio.Future[Answer]
    since: float


class Batcher(Generic[Asked, Answer]):
    """Queue that passes entries to `handle` in ordered batches.

    `handle` returns one answer per entry. If it raises, it has stored nothing: each entry is then handled alone. A
    store outage fails the whole batch. `most` is a batch's maximum weight, `at_once` the number of
    concurrent batches. At `limit` waiting entries, `ask` raises Saturated.
    """

    def __init__(
        self,
        handle: Callable[[Sequence[Asked]], Awaitable[Sequence[Answer]]],
        *,
        most: int,
        weigh: Callable[[Asked], int] = lambda entry: 1,
        at_once: int = 1,
        limit: int | None = None,
        entries: str = "requests",
        watch: Watch = lambda size, waited, took: None,
    ) -> None:
        self._handle = handle
        self._watch = watch
        self._most = most  # a heavier entry is a batch of its own
        self._weigh = weigh
        self._limit = limit
        self._entries = entries
        self._waiting: deque[_Waiting[Asked, Answer]] = deque()
        self._free = at_once
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, entry: Asked) -> Answer:
        """Queue an entry and return its answer. Raises Saturated, or what `handle` raised."""
        if self._limit is not None and len(self._waiting) >= self._limit:
            raise errors.Saturated(f"{len(self._waiting)} {self._entries} are waiting already")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append(_Waiting(entry, answer, loop.time()))
        if self._free:
            self._free -= 1
            task = asyncio.create_task(self._run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await answer

    async def _run(self) -> None:
        try:
            # One event-loop round lets simultaneous callers join the first batch.
            await asyncio.sleep(0)
            time = asyncio.get_running_loop().time
            while self._waiting:
                batch, began = self._take(), time()
                try:
                    await self._answer(batch)
                finally:
                    for waiting in batch:
                        waiting.answer.cancel()  # only those that `stop` left without an answer
                self._watch(len(batch), began - batch[0].since, time() - began)
        finally:
            self._free += 1

    async def _answer(self, batch: list[_Waiting[Asked, Answer]]) -> None:
        try:
            answers = await self._handle([waiting.entry for waiting in batch])
        except Exception as error:  # passed to the callers, who decide
            if len(batch) > 1 and not isinstance(error, errors.StoreUnavailable):
                for waiting in batch:
                    await self._answer([waiting])
                return
            for waiting in batch:
                if not waiting.answer.done():
                    waiting.answer.set_exception(error)
            return
        for waiting, value in zip(batch, answers, strict=True):
            if not waiting.answer.done():
                waiting.answer.set_result(value)

    def _take(self) -> list[_Waiting[Asked, Answer]]:
        batch = [self._waiting.popleft()]
        weight = self._weigh(batch[0].entry)
        while self._waiting:
            weight += self._weigh(self._waiting[0].entry)
            if weight > self._most:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def stop(self) -> None:
        """Cancel waiting callers."""
        await end_tasks(self._tasks)
        while self._waiting:
            self._waiting.popleft().answer.cancel()
