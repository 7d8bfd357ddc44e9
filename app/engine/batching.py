"""Many callers, one call: what is asked for at the same time is answered together.

This is where concurrent deliveries come to share one transaction, and the commits of thousands of
runs one `executemany`. While a batch is being handled the next one gathers by itself, so a lone
caller never waits for company.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from app import errors

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Batcher(Generic[Asked, Answer]):
    """Hands what `ask` is given to `handle` in batches, in order, one batch at a time.

    `handle` returns one answer for each entry. If it raises, every caller of the batch gets the
    error. `limit` bounds how many may wait (then `ask` raises Saturated), `most` the weight of a batch of
    more than one.
    """

    def __init__(
        self,
        handle: Callable[[Sequence[Asked]], Awaitable[Sequence[Answer]]],
        *,
        most: int,
        weigh: Callable[[Asked], int] = lambda entry: 1,
        limit: int | None = None,
        what: str = "requests",
    ) -> None:
        self._handle = handle
        self._most = most
        self._weigh = weigh
        self._limit = limit
        self._what = what
        self._waiting: deque[tuple[Asked, asyncio.Future[Answer]]] = deque()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, entry: Asked) -> Answer:
        """The answer for `entry`. Raises Saturated, or whatever `handle` raised for its batch."""
        if self._limit is not None and len(self._waiting) >= self._limit:
            raise errors.Saturated(f"{len(self._waiting)} {self._what} are waiting already")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((entry, answer))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return await answer

    async def _run(self) -> None:
        # One turn of the loop lets callers of the same moment join the first batch.
        await asyncio.sleep(0)
        while self._waiting:
            batch = self._take()
            try:
                answers = await self._handle([entry for entry, _ in batch])
            except asyncio.CancelledError:
                for _, answer in batch:
                    answer.cancel()
                raise
            except Exception as error:  # handed to every caller, none is lost
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
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
        """Stop the batch in hand and turn away those who wait."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        while self._waiting:
            self._waiting.popleft()[1].cancel()
