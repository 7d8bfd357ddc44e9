"""Event streams and exports over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.support.api_world import Address, World, payload
from trainmedic_server.domain.run import Run
from trainmedic_server.http.limits import ConnectionLimits, ServerLimits
from trainmedic_server.ports.store import HistoryFilter


@contextlib.asynccontextmanager
async def listening(address: Address, query: str = "", **headers: str) -> AsyncIterator[AsyncIterator[str]]:
    timeout = httpx.Timeout(10)
    async with (
        httpx.AsyncClient(base_url=address.url, timeout=timeout) as client,
        client.stream("GET", f"/events{query}", headers=headers) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield answer.aiter_lines()


async def seqs(lines: AsyncIterator[str], count: int) -> list[int]:
    """The seqs of the next `count` events; each carries it as its id too."""
    received: list[int] = []
    last_id = ""
    async for line in lines:
        if line.startswith("id:"):
            last_id = line[3:].strip()
        elif line.startswith("data:"):
            received.append(json.loads(line[5:])["seq"])
            assert last_id == str(received[-1])
            if len(received) == count:
                return received
    raise AssertionError(f"the stream ended after {received}")


async def test_a_reconnecting_client_misses_nothing_and_gets_nothing_twice() -> None:
    """`Last-Event-ID` takes precedence over `after`, while events keep coming."""
    world = World(limits=ServerLimits(poll_seconds=0.01))

    async def happen() -> None:
        while True:
            world.history.append("tick")
            await asyncio.sleep(0.002)

    async with world.served() as address:
        happening = asyncio.create_task(happen())
        received: list[int] = []
        for _ in range(6):
            last = str(received[-1] if received else 0)
            async with listening(address, "?after=3", **{"last-event-id": last}) as lines:
                received += await seqs(lines, 25)
        happening.cancel()
    assert received == list(range(1, 151))


async def test_without_a_position_only_new_events_are_sent() -> None:
    """Earlier events are in the history."""
    world = World(limits=ServerLimits(poll_seconds=0.01))
    world.history.append("old")
    async with world.served() as address, listening(address) as lines:
        first = await anext(lines), await anext(lines)
        assert first[1] == "id: 1"
        world.history.append("new")
        assert await seqs(lines, 1) == [2]


async def test_a_stream_can_be_limited_to_one_run() -> None:
    """Events of other runs are left out."""
    world = World()
    for run_id in ("a", "b", None, "a"):
        world.history.append("tick", run_id)
    async with world.served() as address, listening(address, "?after=0&run_id=a") as lines:
        assert await seqs(lines, 2) == [1, 4]


async def test_a_quiet_stream_has_heartbeats() -> None:
    """Proxies keep the stream open, and a dead one is noticed."""
    world = World(limits=ServerLimits(heartbeat_seconds=0.05))
    async with world.served() as address, listening(address) as lines:
        comments = 0
        async for line in lines:
            comments += line.startswith(":")
            if comments == 3:
                break
    assert comments == 3


async def test_a_stop_of_the_server_does_not_wait_for_streams() -> None:
    """The streams end in order, and the client reconnects with the last ID."""
    world = World()
    loop = asyncio.get_running_loop()
    server = contextlib.AsyncExitStack()
    address = await server.enter_async_context(world.served())
    async with listening(address) as lines:
        await anext(lines)
        began = loop.time()
        stopping = asyncio.create_task(server.aclose())
        assert not [line async for line in lines if line.startswith("data:")]
    await stopping
    assert loop.time() - began < 3


async def test_no_poller_remains_when_clients_disconnect() -> None:
    """This includes clients that vanish without closing."""
    world = World(limits=ServerLimits(poll_seconds=0.01))
    async with world.served() as address:
        async with listening(address) as lines:
            await anext(lines)
            assert any(task.get_name() == "events" for task in asyncio.all_tasks())
        for _ in range(100):
            if not any(task.get_name() == "events" for task in asyncio.all_tasks()):
                return
            await asyncio.sleep(0.02)
        pytest.fail("the poller goes on")


class Endless:
    """Replaces the history's stream by one that does not end, and knows whether it was stopped."""

    def __init__(self, world: World) -> None:
        self.produced = 0
        self.stopped = asyncio.Event()
        self._world = world
        world.history.stream = self.stream  # type: ignore[method-assign, assignment]

    async def stream(self, conditions: HistoryFilter) -> AsyncIterator[Run]:
        (record,) = self._world.history.records.values()
        try:
            while True:
                self.produced += 1
                yield record.run
        finally:
            self.stopped.set()


@pytest.mark.parametrize("accept", ["application/x-ndjson", "text/csv"])
async def test_an_export_stops_when_the_client_disconnects(accept: str) -> None:
    """The query ends too. Until then memory is bounded: unread data is not produced."""
    world = World()
    async with world.served() as address, httpx.AsyncClient(base_url=address.url, timeout=60) as client:
        await client.post("/webhook", json=payload())
        endless = Endless(world)
        async with client.stream("GET", "/history", headers={"accept": accept}) as answer:
            await anext(answer.aiter_bytes())
            produced = -1
            async with asyncio.timeout(60):
                while produced != endless.produced:  # until every buffer on the way is full
                    produced = endless.produced
                    await asyncio.sleep(0.5)
            assert produced < 100_000
        await asyncio.wait_for(endless.stopped.wait(), 60)


async def test_a_client_that_does_not_read_is_disconnected() -> None:
    """Neither an export or stream nor its connection stays open for a client that has stopped reading."""
    world = World(limits=ServerLimits(stall_seconds=0.3))
    unflushed = ConnectionLimits(flush_seconds=0.2)
    async with world.served(unflushed) as address, httpx.AsyncClient(base_url=address.url, timeout=60) as client:
        await client.post("/webhook", json=payload())
        endless = Endless(world)
        reader, writer = await asyncio.open_connection(address.host, address.port, limit=1024)
        writer.write(b"GET /history HTTP/1.1\r\nHost: x\r\nAccept: application/x-ndjson\r\n\r\n")
        await asyncio.wait_for(endless.stopped.wait(), 60)
        await asyncio.sleep(3)  # the sweep comes once a second
        rest = await asyncio.wait_for(reader.read(-1), 60)
        assert rest
        assert not rest.endswith(b"0\r\n\r\n")
        writer.close()


async def test_a_stream_that_fails_midway_is_cut_off_not_ended() -> None:
    """The client can distinguish a part from the whole."""
    world = World()
    async with world.served() as address, httpx.AsyncClient(base_url=address.url, timeout=60) as client:
        await client.post("/webhook", json=payload())
        (record,) = world.history.records.values()

        async def failing(conditions: HistoryFilter) -> AsyncIterator[Run]:
            for _ in range(2000):
                yield record.run
            raise RuntimeError("the disk is gone")

        world.history.stream = failing  # type: ignore[method-assign, assignment]
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/history", headers={"accept": "application/x-ndjson"})
