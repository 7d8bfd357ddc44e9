"""Batching: requests that arrive at the same time are handled together.

So concurrent deliveries share one transaction, and the commits of thousands of runs one `executemany`. The next batch
gathers while others are being handled, so a lone caller never waits for further requests.

Who calls it: ``intake`` and ``recorder``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from trainmedic_server import errors
from trainmedic_server.ports.ending import end_tasks

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Batcher(Generic[Asked, Answer]):
    """Hands what `ask` is given to `handle` in batches, in order, at most `at_once` batches at a time.

    `handle` returns one answer for each entry. If it raises it has kept nothing of the batch: then
    each entry is handled alone, so that only those that cannot be handled fail; in an outage of the
    store every caller of the batch gets the error at once. `limit` bounds how many may wait (then
    `ask` raises Saturated), `most` the weight of a batch of more than one.
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
    ) -> None:
        self._handle = handle
        self._most = most
        self._weigh = weigh
        self._limit = limit
        self._entries = entries
        self._waiting: deque[tuple[Asked, asyncio.Future[Answer]]] = deque()
        self._free = at_once
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, entry: Asked) -> Answer:
        """The answer for `entry`. Raises Saturated, or whatever `handle` raised for its batch."""
        if self._limit is not None and len(self._waiting) >= self._limit:
            raise errors.Saturated(f"{len(self._waiting)} {self._entries} are waiting already")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((entry, answer))
        if self._free:
            self._free -= 1
            task = asyncio.create_task(self._run())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await answer

    async def _run(self) -> None:
        try:
            # One round of the event loop lets callers of the same moment join the first batch.
            await asyncio.sleep(0)
            while self._waiting:
                await self._answer(self._take())
        finally:
            self._free += 1

    async def _answer(self, batch: list[tuple[Asked, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._handle([entry for entry, _ in batch])
        except asyncio.CancelledError:
            for _, answer in batch:
                answer.cancel()
            raise
        except Exception as error:  # goes to the callers, each of whom decides about it
            if len(batch) > 1 and not isinstance(error, errors.StoreUnavailable):
                for entry_and_answer in batch:
                    await self._answer([entry_and_answer])
                return
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), value in zip(batch, answers, strict=True):
            if not answer.done():
                answer.set_result(value)

    def _take(self) -> list[tuple[Asked, asyncio.Future[Answer]]]:
        batch = [self._waiting.popleft()]
        weight = self._weigh(batch[0][0])
        while self._waiting:
            weight += self._weigh(self._waiting[0][0])
            if weight > self._most:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def stop(self) -> None:
        """Cancel the batches that are being handled, and the callers that wait."""
        await end_tasks(self._tasks)
        while self._waiting:
            self._waiting.popleft()[1].cancel()
