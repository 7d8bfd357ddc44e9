"""How much memory bodies take together, and who gives way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from starlette.requests import Request
from starlette.types import Message

from trainmedic_server.errors import PayloadError
from trainmedic_server.http.body import BodyReader, parse_json
from trainmedic_server.http.body_memory import BodyArrival, BodyMemory, Turns
from trainmedic_server.http.limits import ServerLimits
from trainmedic_server.http.problems import HttpProblem

LIMITS = ServerLimits(body_bytes=1000, small_body_bytes=100, small_bytes=150, large_bytes=1000, parsed_bytes=200)


class Sender:
    """A request whose body is sent piece by piece."""

    def __init__(self, reader: BodyReader) -> None:
        self._pieces: asyncio.Queue[Message] = asyncio.Queue()
        self._done = asyncio.Event()
        self.reading = asyncio.create_task(self._read(reader))

    async def send(self, piece: bytes, more: bool = True) -> None:
        await self._pieces.put({"type": "http.request", "body": piece, "more_body": more})
        for _ in range(5):
            await asyncio.sleep(0)

    async def finish(self) -> int:
        """The status with which the request would be answered."""
        self._done.set()
        return await asyncio.wait_for(self.reading, 60)

    async def _read(self, reader: BodyReader) -> int:
        request = Request({"type": "http", "headers": []}, self._pieces.get)
        try:
            async with reader.read(request):
                await self._done.wait()
        except HttpProblem as problem:
            return problem.status
        return 200


@contextlib.asynccontextmanager
async def senders(count: int) -> AsyncIterator[list[Sender]]:
    reader = BodyReader(LIMITS)
    made = [Sender(reader) for _ in range(count)]
    yield made
    for sender in made:
        sender.reading.cancel()


async def test_the_body_that_arrives_slowest_gives_way() -> None:
    """Somebody who sends a part and waits cannot keep a delivery out."""
    async with senders(2) as (slow, prompt):
        await slow.send(b"x" * 90)
        await prompt.send(b"x" * 90, more=False)
        assert await slow.finish() == 503
        assert await prompt.finish() == 200


async def test_a_body_that_gave_way_is_not_taken_although_its_end_has_arrived() -> None:
    """Its memory is another's: it would be held beside it, uncounted, and a large one parsed in the turn of a small."""
    async with senders(2) as (slow, prompt):
        await slow.send(b"x" * 90)
        ends = [asyncio.create_task(each.send(b"x" * size, more=False)) for each, size in ((prompt, 90), (slow, 10))]
        await asyncio.gather(*ends)
        assert await slow.finish() == 503
        assert await prompt.finish() == 200


async def test_a_body_whose_time_ends_as_it_has_to_give_way_disturbs_no_other() -> None:
    """Its task has not ended yet, and its deadline cannot be brought forward any more."""
    memory = BodyMemory(LIMITS)
    late, prompt = BodyArrival(), BodyArrival()

    async def arrive() -> None:
        late.deadline = asyncio.timeout(None)
        async with late.deadline:
            memory.grow(late, 90)
            late.deadline.reschedule(0)
            await asyncio.Event().wait()

    arriving = asyncio.create_task(arrive())
    while late.deadline is None or not late.deadline.expired():
        await asyncio.sleep(0)
    assert not arriving.done()
    assert memory.grow(prompt, 90)
    with pytest.raises(TimeoutError):
        await arriving
    assert late.gave_way


async def test_a_whole_body_gives_way_to_none() -> None:
    """It may have been committed already."""
    async with senders(2) as (first, second):
        await first.send(b"x" * 90, more=False)
        await second.send(b"x" * 90, more=False)
        assert await second.finish() == 503
        assert await first.finish() == 200


async def test_large_bodies_leave_room_for_small_ones() -> None:
    """Their share may be full and their turn taken: a delivery of usual size goes past them."""
    async with senders(3) as (first, second, small):
        await first.send(b"x" * 500, more=False)
        await second.send(b"x" * 500, more=False)
        await small.send(b"x" * 50, more=False)
        assert await small.finish() == 200
        assert not first.reading.done()
        assert [await first.finish(), await second.finish()] == [200, 200]


async def test_what_a_body_held_is_free_again() -> None:
    """Also that of one which moved from the small to the large, and of one that gave way."""
    reader = BodyReader(LIMITS)
    for _ in range(20):
        grown, slow, prompt = (Sender(reader) for _ in range(3))
        await grown.send(b"x" * 90)
        await grown.send(b"x" * 600, more=False)
        await slow.send(b"x" * 90)
        await prompt.send(b"x" * 90, more=False)
        assert [await sender.finish() for sender in (grown, slow, prompt)] == [200, 503, 200]


async def test_turns_are_taken_in_order_and_bounded() -> None:
    """Sizes together stay below the limit, a larger one is alone, and a cancelled caller leaves no gap."""
    turns = Turns(10)
    in_use: list[int] = []
    most = 0

    async def caller(size: int) -> None:
        nonlocal most
        await turns.take(size)
        in_use.append(size)
        most = max(most, sum(in_use) if len(in_use) > 1 else 0)
        await asyncio.sleep(0)
        in_use.remove(size)
        turns.give_back(size)

    callers = [asyncio.create_task(caller(size)) for size in (4, 6, 50, 3, 3, 3, 9, 50, 1) * 5]
    await asyncio.sleep(0)
    for cancelled in callers[5:20:4]:
        cancelled.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    assert most == 10
    await asyncio.wait_for(turns.take(50), 60)


@pytest.mark.parametrize("member", [b"[],", b"{},", b'{"a":{}},', b"[[]],"])
def test_a_body_of_nothing_but_lists_and_objects_is_not_parsed(member: bytes) -> None:
    """It would take twenty times its size; the shortest alerts, and as many, are far from that."""
    with pytest.raises(HttpProblem) as caught:
        parse_json(b"[" + member * (8_000_000 // len(member)) + b"1]")
    assert caught.value.status == 413
    shortest = b'{"status":"firing","labels":{"alertname":"A"},"startsAt":"2026-01-31T11:59:00Z"},'
    assert len(parse_json(b"[" + shortest * 100_000 + b"1]")) == 100_001


def test_half_a_surrogate_is_found_without_a_list_of_all_members() -> None:
    """At its path, however deep; the search itself takes no memory for what it passes."""
    with pytest.raises(PayloadError) as caught:
        parse_json(rb'{"alerts": [[], {"labels": {"a": "b", "c": "\ud800"}}]}')
    assert caught.value.problems[0][0] == "alerts.1.labels.c"
    with pytest.raises(PayloadError) as caught:
        parse_json(rb'{"a": [], "b": {"\udfff": 1}}')
    assert caught.value.problems[0][0] == "b"
