"""Many callers, one call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from trainmedic_server import errors
from trainmedic_server.engine.batching import Batcher


async def test_callers_of_one_moment_share_a_batch_and_each_gets_its_answer() -> None:
    """In order; and those who come while a batch is handled form the next."""
    batches: list[list[int]] = []

    async def double(entries: Sequence[int]) -> list[int]:
        batches.append(list(entries))
        await asyncio.sleep(1)
        return [2 * entry for entry in entries]

    batcher = Batcher(double, most=100)
    first = asyncio.gather(*(batcher.ask(n) for n in range(3)))
    await asyncio.sleep(0.5)
    second = asyncio.gather(*(batcher.ask(n) for n in (7, 8)))
    assert [*await first, *await second] == [0, 2, 4, 14, 16]
    assert batches == [[0, 1, 2], [7, 8]]


async def test_a_batch_is_bounded_by_weight_but_takes_one_at_least() -> None:
    """A heavy entry goes alone."""
    batches: list[list[int]] = []

    async def note(entries: Sequence[int]) -> list[None]:
        batches.append(list(entries))
        return [None] * len(entries)

    batcher = Batcher(note, most=10, weigh=lambda entry: entry)
    await asyncio.gather(*(batcher.ask(weight) for weight in (4, 5, 3, 50, 1)))
    assert batches == [[4, 5], [3], [50], [1]]


async def test_a_full_queue_refuses_at_once() -> None:
    """What was accepted before is still answered."""

    async def slow(entries: Sequence[int]) -> list[int]:
        await asyncio.sleep(1)
        return list(entries)

    batcher = Batcher(slow, most=1, limit=2, entries="deliveries")
    waiting = asyncio.gather(*(batcher.ask(n) for n in range(2)))
    await asyncio.sleep(0)
    with pytest.raises(errors.Saturated, match="2 deliveries are waiting"):
        await batcher.ask(9)
    assert await waiting == [0, 1]


async def test_an_error_reaches_every_caller_of_its_batch_and_no_other() -> None:
    """The next batch is handled as if nothing had been."""

    async def handle(entries: Sequence[int]) -> list[int]:
        if 0 in entries:
            raise errors.StoreUnavailable("away")
        return list(entries)

    batcher = Batcher(handle, most=2)
    answers = await asyncio.gather(*(batcher.ask(n) for n in range(4)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [errors.StoreUnavailable, errors.StoreUnavailable, int, int]


async def test_a_stop_leaves_no_caller_without_an_answer() -> None:
    """Also while the entries of a batch that failed are handled one after another."""

    async def handle(entries: Sequence[int]) -> list[int]:
        if len(entries) > 1:
            raise ValueError("one of them is wrong")
        await asyncio.Event().wait()
        return list(entries)

    batcher = Batcher(handle, most=3)
    callers = [asyncio.create_task(batcher.ask(n)) for n in range(5)]
    await asyncio.sleep(1)
    await batcher.stop()
    await asyncio.wait(callers, timeout=1)
    assert all(caller.cancelled() for caller in callers)
