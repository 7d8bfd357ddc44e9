"""What one connection, and all together, can make the server hold, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.support.api_world import Address, World
from trainmedic_server.auth.auth import Authenticator
from trainmedic_server.auth.tokens import Token, TokenRole
from trainmedic_server.http.limits import ConnectionLimits, ServerLimits

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
BOUNDS = ConnectionLimits(connections=4, refused=2, per_client=4)
WITH_TOKEN = b"GET /history HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer look\r\n\r\n"
HALF_A_BODY = b"POST /webhook HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer hook\r\nContent-Length: 9\r\n\r\n{"


def with_tokens() -> World:
    tokens = [
        Token(name, hashlib.sha256(secret.encode()).digest(), frozenset({role}))
        for name, secret, role in (("am", "hook", TokenRole.WEBHOOK), ("ann", "look", TokenRole.VIEWER))
    ]
    return World(auth=Authenticator(tokens))


@contextlib.asynccontextmanager
async def connected(address: Address, request: bytes = b"") -> AsyncIterator[asyncio.StreamReader]:
    """A connection over which `request` was sent, and its reply read where it is a whole one."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(request)
    if request.endswith(b"\r\n\r\n"):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        length = re.search(rb"content-length: (\d+)", head)
        await reader.readexactly(int(length[1]) if length else 0)
    yield reader
    writer.close()


async def is_closed(reader: asyncio.StreamReader, within: float = 0.5) -> bool:
    """Whether the server has ended the connection, or does so within so many seconds."""
    try:
        async with asyncio.timeout(within):
            return await reader.read() == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1.1 (\d{3})", answer)]


async def test_pipelined_requests_are_answered_in_order() -> None:
    """HTTP/1.1 requires it, although few clients send them so."""
    async with World().served() as address:
        missing = b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n"
        last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        assert statuses(await address.raw(HEALTH + missing + HEALTH + missing + last)) == [200, 404, 200, 404, 200]


@pytest.mark.parametrize("rest", [b"", b"\x00 not HTTP", b"GET /health HTTP/1.1\r\nA: " + b"a" * 40_000])
async def test_excess_requests_end_the_connection_after_the_replies(rest: bytes) -> None:
    """Too many waiting requests or an unreadable one: each whole request before gets its reply first."""
    async with World().served() as address:
        count = 3 if rest else 40
        answer = await address.raw(HEALTH * count + rest)
        assert statuses(answer) == [200] * (3 if rest else 9)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /health?" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 200_000, 431),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 101 + b"\r\n", 431),
        (b"POST /webhook HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"a" * 90_000 + b"\r\n", 431),
        (b"POST /webhook HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /webhook HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}x", 400),
        (b"POST /webhook HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 400),
        (b"POST /webhook HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST /webhook HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\nHost: x\n\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n A: folded\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"CONNECT evil.example:80 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n" + HEALTH, 200),
    ],
)
async def test_odd_requests_have_one_answer_of_a_known_kind(request_: bytes, status: int) -> None:
    """A problem document is sent and the connection closed: no later bytes can be read as another request."""
    async with World().served() as address:
        answer = await address.raw(request_)
        assert statuses(answer) == [status]
        if status != 200:
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b"application/problem+json" in head
            assert json.loads(body)["status"] == status
        assert statuses(await address.raw(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))) == [200]


async def test_line_ends_do_not_keep_an_idle_connection_open() -> None:
    """The bytes of an unread body do not, either: only the next request does."""
    limits = ConnectionLimits(head_seconds=0.5, keep_alive_seconds=1)
    unread = b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    async with World().served(limits) as address:
        for begin, more in ((b"", b"\r\n"), (HEALTH, b"\r\n"), (unread, b"x")):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(begin)
            ended = asyncio.create_task(reader.read())
            async with asyncio.timeout(60):
                while not ended.done():
                    writer.write(more)
                    await asyncio.sleep(0.1)
            writer.close()


async def test_a_response_must_be_read_in_time() -> None:
    """This includes responses that are not streams."""
    world = World()
    world.catalog.problems = [
        type("Large", (), {"file": "x" * 8_000_000, "line": None, "column": None, "message": ""})()
    ]
    async with world.served(ConnectionLimits(flush_seconds=0.5)) as address:
        reader, writer = await asyncio.open_connection(address.host, address.port, limit=1024)
        writer.write(b"GET /playbooks HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(4)  # the connections are looked at once a second
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(8_000_000), 60)
        writer.close()


async def test_unauthenticated_clients_leave_capacity_for_a_new_client() -> None:
    """The connection silent longest is closed; one that has presented a token is not."""
    async with with_tokens().served(BOUNDS) as address, contextlib.AsyncExitStack() as stack:
        viewer = await stack.enter_async_context(connected(address, WITH_TOKEN))
        deliverer = await stack.enter_async_context(connected(address, HALF_A_BODY))
        await asyncio.sleep(0.1)
        crowd = [await stack.enter_async_context(connected(address, HEALTH)) for _ in range(10)]
        assert all([await is_closed(reader, within=60) for reader in crowd[:8]])
        assert not any([await is_closed(reader) for reader in (*crowd[8:], viewer, deliverer)])


async def test_excess_concurrent_requests_get_503_with_retry_after() -> None:
    """No connection can be closed to make room. Requests are accepted again once a client has left."""
    async with with_tokens().served(BOUNDS) as address:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(4):
                await stack.enter_async_context(connected(address, HALF_A_BODY))
            await asyncio.sleep(0.1)
            answer = await address.raw(HEALTH)
            assert statuses(answer) == [503]
            assert b"retry-after" in answer.lower()
            assert b"application/problem+json" in answer
        await asyncio.sleep(0.1)
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{address.url}/health")).status_code == 200


async def test_a_disconnected_listener_is_noticed_behind_a_waiting_request() -> None:
    """Its place among the event streams becomes free again."""
    world = World(limits=ServerLimits(streams=1, heartbeat_seconds=0.1))
    async with world.served() as address:
        for _ in range(5):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n" + HEALTH)
            async with asyncio.timeout(60):
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
                writer.close()
                while any(task.get_name() == "events" for task in asyncio.all_tasks()):
                    await asyncio.sleep(0.02)
