"""What stands outside: a small HTTP server whose answers the path chooses, and a real Alertmanager."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.support.programs import free_port
from trainmedic_server.adapters.system_clock import SystemClock


@dataclass
class Request:
    """One request as it came over the wire; header names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Peer:
    """A server on the loopback; ``requests`` are those it has read."""

    port: int
    requests: list[Request] = field(default_factory=list)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"


_ANSWER = b'{"status": "success", "data": {"result": [{"metric": {}, "values": [[0, "7"]]}]}, %s}'
METRIC_ANSWERS = {
    "metrics-warned": _ANSWER % b'"warnings": ["receive series from Addr: store-1: unavailable", "more"]',
    "metrics-partial": _ANSWER % b'"isPartial": true',
    "metrics-informed": _ANSWER
    % b'"warnings": ["PromQL info: not a counter", "PromQL warning: a mix of types"], "infos": ["x"]',
    "metrics-whole": _ANSWER % b'"warnings": null, "isPartial": false',
}
"""Of Thanos, a VictoriaMetrics cluster, Prometheus 2.48 and 3, and any of them."""


def _answer(request: Request) -> tuple[str, dict[str, str], bytes]:
    path = request.path.partition("?")[0]
    if path.startswith("/status/"):
        return path.split("/")[2], {}, b"said no"
    if path == "/redirect":
        return "302", {"Location": "/ok"}, b""
    if path == "/big":
        return "200", {}, b"x" * 200_000
    if path == "/zipped":
        return "200", {"Content-Encoding": "gzip"}, gzip.compress(b"0" * 50_000_000, 1)
    if path == "/echo":
        return "200", {"X-Seen": request.headers.get("authorization", "")}, repr(request.headers).encode()
    if path == "/json":
        return "200", {"Content-Type": "application/json", "Set-Cookie": "session=1", "ETag": '"7"'}, b'{"done": true}'
    if path.startswith("/list/"):
        return "200", {"Content-Type": "application/json"}, b"[]"
    if path.startswith("/metrics-"):
        return "200", {"Content-Type": "application/json"}, METRIC_ANSWERS[path.split("/")[1]]
    if path == "/latin":
        return "200", {"Content-Type": "text/plain; charset=iso-8859-1"}, "größer".encode("iso-8859-1")
    if path == "/charset":
        return "200", {"Content-Type": "text/plain; charset=klingon"}, b"qapla\xff"
    return "200", {"Content-Type": "text/plain"}, b"fine"


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    stop = asyncio.Event()
    known = Peer(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
            request = Request(method, path, headers, await reader.readexactly(int(headers.get("content-length", "0"))))
            known.requests.append(request)
            if path == "/close":
                return
            if path == "/hang":
                await stop.wait()
                return
            status, more, body = _answer(request)
            lines = [f"HTTP/1.1 {status} Reason", *(f"{name}: {value}" for name, value in more.items())]
            lines.append(f"Content-Length: {len(body) if path != '/stall' else 1000}")
            writer.write("\r\n".join([*lines, "Connection: close", "", ""]).encode() + body)
            await writer.drain()
            if path == "/stall":
                await stop.wait()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    known.port = server.sockets[0].getsockname()[1]
    yield known
    stop.set()
    server.close()
    await server.wait_closed()


@pytest.fixture(scope="session")
def clock() -> SystemClock:
    return SystemClock()


@pytest.fixture
def closed_port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real Alertmanager with a path prefix."""
    program = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
    if program is None:
        pytest.fail("no Alertmanager is installed")
    home: Path = tmp_path_factory.mktemp("alertmanager")
    config = home / "alertmanager.yml"
    config.write_text("route: {receiver: nobody}\nreceivers: [{name: nobody}]\n")
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        program,
        f"--config.file={config}",
        f"--storage.path={home}",
        f"--web.listen-address={url.removeprefix('http://')}",
        "--web.route-prefix=/am",
        "--cluster.listen-address=",
        "--log.level=error",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await_ready(f"{url}/am/-/ready", process)
        yield f"{url}/am"
    finally:
        process.terminate()
        process.wait(60)


def _await_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(url, timeout=1).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    pytest.fail("the Alertmanager did not become ready")
