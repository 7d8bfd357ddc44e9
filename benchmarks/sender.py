"""Cheap stand-in for Alertmanager: webhook requests as bytes, sent over kept-alive connections.

The sender shares the machine with the measured server, so it parses little of a reply.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request with its reply, in seconds of ``time.time()``."""

    sent_at: float
    replied_at: float
    status: int
    body: bytes

    @property
    def seconds(self) -> float:
        return self.replied_at - self.sent_at

    def json(self) -> Any:
        return json.loads(self.body)


def alert(labels: dict[str, str], starts_at: datetime | None = None, resolved: bool = False) -> dict[str, Any]:
    """Return an entry of ``alerts[]``. The fingerprint follows from the labels."""
    started = (starts_at or datetime.now(UTC)).isoformat().replace("+00:00", "Z")
    return {
        "status": "resolved" if resolved else "firing",
        "labels": labels,
        "annotations": {"summary": "benchmark", "description": "An alert that a benchmark made."},
        "startsAt": started,
        "endsAt": datetime.now(UTC).isoformat().replace("+00:00", "Z") if resolved else "0001-01-01T00:00:00Z",
        "generatorURL": "http://prometheus:9090/graph?g0.expr=up&g0.tab=1",
        "fingerprint": hashlib.sha256(json.dumps(labels, sort_keys=True).encode()).hexdigest()[:16],
    }


def webhook(alerts: Sequence[dict[str, Any]], path: str = "/webhook") -> bytes:
    """Return Alertmanager's request for these alerts, with headers."""
    firing = any(entry["status"] == "firing" for entry in alerts)
    shared = set.intersection(*(set(entry["labels"].items()) for entry in alerts))
    payload = {
        "version": "4",
        "groupKey": '{}:{alertname="Benchmark"}',
        "truncatedAlerts": 0,
        "status": "firing" if firing else "resolved",
        "receiver": "trainmedic",
        "groupLabels": {"alertname": alerts[0]["labels"]["alertname"]},
        "commonLabels": dict(shared),
        "commonAnnotations": alerts[0]["annotations"],
        "externalURL": "http://alertmanager:9093",
        "alerts": list(alerts),
    }
    return _request("POST", path, json.dumps(payload).encode())


def get(path: str) -> bytes:
    return _request("GET", path, b"")


def _request(method: str, path: str, body: bytes) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: Alertmanager/0.28.1\r\n"
    if body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}\r\n".encode() + body


class Connection(asyncio.Protocol):
    """A kept-alive HTTP/1.1 connection with at most one open request."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._reply: asyncio.Future[tuple[int, bytes]] | None = None

    @classmethod
    async def open(cls, url: str) -> Connection:
        host, _, port = url.removeprefix("http://").partition(":")
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, int(port))
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from it

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        length = _LENGTH.search(self._received, 0, end + 2)
        if length is None:
            self._settle(error=ConnectionError("a reply without Content-Length"))
            return
        total = end + 4 + int(length.group(1))
        if len(self._received) >= total:
            reply = (int(self._received[9:12]), bytes(self._received[end + 4 : total]))
            del self._received[:total]
            self._settle(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle(error=ConnectionError("the server closed the connection"))

    def _settle(self, reply: tuple[int, bytes] | None = None, error: Exception | None = None) -> None:
        waiting, self._reply = self._reply, None
        if waiting is None or waiting.done():
            return
        if reply is not None:
            waiting.set_result(reply)
        elif error is not None:
            waiting.set_exception(error)

    async def send(self, request: bytes) -> Exchange:
        assert self._transport is not None
        self._reply = asyncio.get_running_loop().create_future()
        sent_at = time.time()
        self._transport.write(request)
        status, body = await self._reply
        return Exchange(sent_at, time.time(), status, body)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def send_all(url: str, requests: Iterable[bytes], concurrency: int) -> list[Exchange]:
    """Send the requests over `concurrency` connections, each as soon as one is free."""
    queue = iter(requests)
    done: list[Exchange] = []

    async def drain(connection: Connection) -> None:
        for request in queue:
            done.append(await connection.send(request))  # noqa: PERF401

    connections = [await Connection.open(url) for _ in range(concurrency)]
    try:
        await asyncio.gather(*(drain(connection) for connection in connections))
    finally:
        for connection in connections:
            connection.close()
    return done
